"""A child that trains on real files, and writes down what it was promised; its tests trouble it.

python -m tests.kernel.trainee      # serves children, as tests.forking says
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, NoReturn

import torch

from gds import PosixBackend, StorageError
from gds.probe import DirectIOUnavailable
from offload import AdamW, OffloadError, SealHandle, open_checkpoint
from tests.forking import TIMEOUT_S, Children, Ended, serve
from tests.kernel.tracing import has_ended
from tests.stores.training import Model, Reference, backward, differences, optimizer_for, options

LAST_STEP: Final = 5
REPLACED: Final = 4
"""The step whose train state is replaced once it is durable."""

END: Final = LAST_STEP + 1

GO: Final = "go"
"""The fifo by which a test lets a child go on."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a child is to do. It reads it from ``plan.json`` in its directory."""

    store: tuple[str, ...] = ()
    """Directories; none: ``run`` in its own."""

    keep: int = 2
    last_step: int = LAST_STEP

    wait_before: int | None = None
    """The step before which it waits for `GO`: 0 before it opens the store, `END` before it closes
    it; None for never."""

    restore_after_error: bool = False
    """Whether it waits for `GO` after an error, and then goes on with `restore`."""

    transfer_threads: int | None = None
    """For reads, and for writes; 1 makes the order of all system calls of a thread the same."""


class Report:
    """What a child has to say: lines of a file, which outlive it however it ends."""

    def __init__(self, directory: str | Path) -> None:
        self._path = Path(directory, "report")

    def put_aside(self) -> None:
        """Keep what was said, under another name: the next child begins a new file."""
        self._path = self._path.rename(self._path.with_name(f"report-{time.monotonic_ns()}"))

    def tell(self, what: str, value: object) -> None:
        """Add a line."""
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(fd, f"{what} {value}\n".encode())
        os.close(fd)

    def lines(self) -> list[tuple[str, str]]:
        """Return what was said so far."""
        if not self._path.exists():
            return []
        pairs = (line.partition(" ") for line in self._path.read_text().splitlines())
        return [(what, value) for what, _, value in pairs]

    def values(self, what: str) -> list[str]:
        """Return what was said under one head."""
        return [value for head, value in self.lines() if head == what]

    @property
    def acknowledged(self) -> int:
        """The step of the checkpoint that was acknowledged last; 0 if none was."""
        return max(map(int, self.values("acknowledged")), default=0)

    @property
    def promised(self) -> int:
        """The same, and what it was given to restore is a promise as well."""
        return max(self.acknowledged, *map(int, self.values("restored")), 0)


def train(directory: str) -> NoReturn:
    """Train as ``plan.json`` says; ends with status 1 after an error that has a name, else 0."""
    plan, report = read_plan(directory), Report(directory)
    warnings.simplefilter("always")
    warnings.showwarning = lambda message, *_: report.tell("warning", message)
    run = _Run(directory, plan, report)
    try:
        run.go_on()
    except (OffloadError, StorageError) as error:
        _tell_error(report, error)
        is_open = run.optimizer is not None and not run.is_closing
        if not plan.restore_after_error or not report.promised or not is_open:
            run.give_up()
            raise SystemExit(1) from None
        _wait(directory, report)
        run.go_on()  # which must succeed
    # The store is closed. How a program ends is what tests/kernel/endings.py is about; to take the
    # interpreter down takes three times as long as all of the training.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class _Run:
    def __init__(self, directory: str, plan: Plan, report: Report) -> None:
        self._directory = directory
        self._plan = plan
        self._report = report
        self._model = Model()
        self._has_waited = False
        self.is_closing = False
        self.optimizer: AdamW | None = None

    def go_on(self) -> None:
        """Open the store if it is not open, restore, and train to the last step."""
        if self.optimizer is None:
            self._wait_before(0)
            self.optimizer = self._open()
        found = self.optimizer.restore()
        step = found.step if found else 0
        self._report.tell("restored", step)
        handle: SealHandle | None = None
        while step < self._plan.last_step:
            step += 1
            self._wait_before(step)
            backward(self._model, step)
            self.optimizer.step()
            if handle is not None:
                self._report.tell("acknowledged", handle.result().step)
            handle = self.optimizer.checkpoint({"step": step})
            if step == REPLACED:
                handle.result()
                self.optimizer.checkpoint({"step": step, "only": "the train state"}).result()
                handle = self.optimizer.checkpoint({"step": step})
        if handle is not None:
            self._report.tell("acknowledged", handle.result().step)
        self._wait_before(END)
        self.is_closing = True
        self.optimizer.close()
        self._report.tell("ended", step)

    def give_up(self) -> None:
        """Close what is open."""
        if self.optimizer is not None:
            try:
                self.optimizer.close()
            except (OffloadError, StorageError) as error:
                _tell_error(self._report, error)

    def _open(self) -> AdamW:
        plan = self._plan
        store = list(plan.store or [f"{self._directory}/run"])
        # The recorder makes calls when a second is over, and faults are counted by calls.
        changes: dict[str, object] = {"allow_volatile": True, "record": False}
        if plan.transfer_threads is not None:
            number = plan.transfer_threads
            changes["backend"] = PosixBackend(read_threads=number, write_threads=number)
        return optimizer_for(self._model, store, options(**changes), keep=plan.keep)

    def _wait_before(self, step: int) -> None:
        if step == self._plan.wait_before and not self._has_waited:
            self._has_waited = True
            if self.optimizer is not None:
                self.optimizer.synchronize()
            _wait(self._directory, self._report)


def _wait(directory: str, report: Report) -> None:
    report.tell("waiting", os.getpid())
    Path(directory, GO).read_bytes()


def _tell_error(report: Report, error: Exception) -> None:
    report.tell("error", f"{type(error).__name__}: {error}".replace("\n", " "))


# The tests' side.


class Trainees:
    """Starts children that train, and looks after what they leave."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._children = Children("tests.kernel.trainee")
        self.reference = Reference()

    def close(self) -> None:
        """End the server of the children."""
        self._children.close()

    def start(self, directory: Path, plan: Plan) -> int:
        """Start a child in a directory; returns its process number."""
        directory.mkdir(exist_ok=True)
        if not (directory / GO).exists():
            os.mkfifo(directory / GO)
        (directory / "plan.json").write_text(json.dumps(asdict(plan)))
        return self._children.start(train, directory)

    def wait(self, pid: int, directory: Path, timeout_s: float = TIMEOUT_S) -> Ended:
        """Wait for a child to end; fails if it hangs, or ends by an error that has no name."""
        ended = self._children.wait(pid, directory, timeout_s)
        assert ended.status is not None, f"it hangs: {Report(directory).lines()}"
        assert "Traceback" not in ended.output, ended.output
        assert all(len(error) > 40 for error in Report(directory).values("error"))
        return ended

    def run(self, directory: Path, plan: Plan = Plan()) -> Report:
        """Let a child train undisturbed, to its last step; returns what it has said."""
        ended = self.wait(self.start(directory, plan), directory)
        report = Report(directory)
        assert os.waitstatus_to_exitcode(ended.status or 0) == 0, report.lines()
        assert report.values("ended")[-1] == str(plan.last_step)
        return report

    def resume(self, directory: Path, plan: Plan, acknowledged: int) -> int:
        """Resume in a new process, train to the end, and check every bit that is there then.

        Returns:
            The step from which it went on, which is not before `acknowledged`.
        """
        if (directory / "report").exists():
            Report(directory).put_aside()
        report = self.run(directory, plan)
        restored = int(report.values("restored")[0])
        assert restored >= acknowledged, f"step {acknowledged} was lost: {report.lines()}"
        assert not report.values("error")
        store = plan.store[0] if plan.store else f"{directory}/run"
        assert self.newest(store) == plan.last_step
        slots = [name for name in os.listdir(store) if name.startswith((".slot-", "step-"))]
        assert restored == plan.last_step or len(slots) <= plan.keep + 1
        return restored

    def newest(self, store: str | Path) -> int:
        """Compare the newest checkpoint with an uninterrupted run; returns its step, 0 if none."""
        if not os.path.isdir(store) or not any(n.startswith("step-") for n in os.listdir(store)):
            return 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DirectIOUnavailable)
            found = open_checkpoint(store)
        with found:
            assert found.train_state["step"] == found.step
            backend = PosixBackend(direct=False)
            assert differences(found, backend, self.reference.after(found.step)) == []
            return found.step


def read_plan(directory: str) -> Plan:
    """Return the plan in a directory."""
    values = json.loads(Path(directory, "plan.json").read_text())
    return Plan(**{**values, "store": tuple(values["store"])})


def wait_until_it_waits(
    directory: Path, pid: int, times: int = 1, timeout_s: float = TIMEOUT_S
) -> None:
    """Wait until a child waits for `GO`, or has ended without getting there."""
    deadline = time.monotonic() + timeout_s
    while len(Report(directory).values("waiting")) < times:
        assert time.monotonic() < deadline, "it does not get there"
        if has_ended(pid):
            return
        time.sleep(0.002)


def let_go(directory: Path, pid: int, timeout_s: float = TIMEOUT_S) -> None:
    """Let a child go on that waits for `GO`; does nothing if it has ended."""
    deadline = time.monotonic() + timeout_s
    while not has_ended(pid):
        try:
            fd = os.open(directory / GO, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno != errno.ENXIO:  # nobody reads yet
                raise
            assert time.monotonic() < deadline, "it does not wait"
            time.sleep(0.001)
            continue
        os.write(fd, b".")
        os.close(fd)
        return


def copied(template: Path, directory: Path) -> Path:
    """Copy a directory with a store in it."""
    shutil.copytree(template, directory, ignore=shutil.ignore_patterns(GO, "report*", "output-*"))
    return directory


if __name__ == "__main__":
    serve(globals())
