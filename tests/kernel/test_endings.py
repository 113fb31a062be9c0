"""However a program ends: it ends, and what was sealed, or asked for, is there."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pytest

from gds import PosixBackend
from offload import open_checkpoint
from tests.forking import Children, Ended
from tests.kernel import endings
from tests.stores.training import Model, Reference, differences, optimizer_for, options

TIMEOUT_S = 240.0


ABORTS = (
    "terminate called without an active exception",  # torch, whose thread Python has ended
    "at interpreter shutdown, possibly due to daemon threads",  # Python, if it was printing
)
"""What may be said last in a program that ends beside a daemon thread, whatever that does."""


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    server = Children("tests.kernel.endings")
    yield server
    server.close()


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


@pytest.fixture
def overlap(request: pytest.FixtureRequest) -> str | None:
    return getattr(request, "param", None)


with_overlap = pytest.mark.parametrize(
    "overlap", [None, "forward"], indirect=True, ids=["waited-for", "overlap=forward"]
)


class Program:
    """Runs one program, and looks at what it leaves."""

    def __init__(
        self, children: Children, reference: Reference, directory: Path, overlap: str | None
    ) -> None:
        self._children = children
        self._reference = reference
        self.directory = directory
        (directory / "overlap").write_text(json.dumps(overlap))

    def run(
        self,
        work: Callable[[str], None],
        status: int,
        named: Collection[str] | None = (),
        torch_may_abort: bool = False,
    ) -> list[str]:
        """Return the lines that it has printed.

        Args:
            work: What it does.
            status: What it must end with.
            named: Errors that nobody caught in it, if there are any; None if it may be any.
            torch_may_abort: Whether torch may end it first, as it ends any program so.
        """
        pid = self._children.start(work, self.directory)
        ended: Ended = self._children.wait(pid, self.directory, TIMEOUT_S)
        assert ended.status is not None, f"it hangs: {ended.output}"
        found = os.waitstatus_to_exitcode(ended.status)
        if torch_may_abort and found == -signal.SIGABRT:
            assert any(words in ended.output for words in ABORTS), ended.output
            return []
        assert found == status, ended.output
        errors = re.findall(r"^([\w.]*Error|KeyboardInterrupt)\b", ended.output, re.MULTILINE)
        assert named is None or set(errors) <= set(named), ended.output
        # Where there are some the program may have ended in the middle of saying so.
        if named is not None and not named:
            assert "Traceback" not in ended.output
        return ended.output.splitlines()

    def newest(self) -> int:
        """Check the newest checkpoint, and that the store can be opened; returns its step."""
        with open_checkpoint(self.directory / "run") as found:
            assert found.train_state == {"step": found.step}
            assert differences(found, PosixBackend(), self._reference.after(found.step)) == []
        with optimizer_for(Model(), f"{self.directory}/run", options()) as optimizer:
            restored = optimizer.restore()
            assert restored is not None
            assert restored.step == found.step
        return found.step


@pytest.fixture
def program(
    children: Children, reference: Reference, tmp_path: Path, overlap: str | None
) -> Program:
    return Program(children, reference, tmp_path, overlap)


@with_overlap
@pytest.mark.parametrize(
    ("work", "status"),
    [
        (endings.ends_at_once, 0),
        (endings.ends_by_an_error, 1),
        (endings.trains_on_a_thread_that_exits, 0),
        (endings.interrupted_while_sealing, -signal.SIGINT),
        (endings.garbage_when_the_interpreter_ends, 0),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_checkpoint_is_there(work: Callable[[str], None], status: int, program: Program) -> None:
    program.run(work, status, {1: ["RuntimeError"], -2: ["KeyboardInterrupt"]}.get(status, []))
    assert program.newest() == 2


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (endings.interrupted_and_closed, ["interrupted", "closed"]),
        (endings.closed_in_an_exit_handler, ["closed"]),
        (endings.dropped, ["2"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_closing_ends_and_waits_for_the_seal(
    work: Callable[[str], None], said: list[str], program: Program
) -> None:
    lines = program.run(work, 0)
    assert [line for line in lines if "resumed step" not in line] == said
    assert program.newest() == 2


def test_training_on_a_daemon_thread_does_not_keep_a_program_from_ending(program: Program) -> None:
    # The thread may find out that everything is closed, and say so, or that it is being closed in
    # the middle of a step: then in whatever words. Or Python ends the thread while it is in torch's
    # backward, which calls std::terminate: plain torch does so every time.
    program.run(endings.trains_on_a_daemon_thread, 0, None, torch_may_abort=True)
    assert program.newest() >= 2


class TestForks:
    @with_overlap
    def test_workers_end_as_they_like(self, program: Program) -> None:
        lines = program.run(endings.workers_that_end, 0)
        assert lines == ["worker: 0"] * 5 + ["3", "went on to 4"]
        assert program.newest() == 4

    def test_use_in_a_forked_process_is_refused_with_the_remedy(self, program: Program) -> None:
        lines = program.run(endings.a_forked_process_steps, 0)
        assert lines[0] == "worker: 0"
        for call, line in zip(
            ("step", "checkpoint", "restore", "synchronize"), lines[1:-1], strict=True
        ):
            assert line.startswith(f"{call}: OffloadError: this optimizer was made in another pro")
            assert "fork workers before constructing it" in line
        assert lines[-1] == "went on to 3"
        assert program.newest() == 3

    def test_workers_of_data_loaders_do_no_harm(self, program: Program) -> None:
        assert program.run(endings.data_loaders_with_workers, 0) == ["went on to 11"]
        assert program.newest() == 11

    def test_a_pickle_is_refused_with_the_remedy(self, program: Program) -> None:
        lines = program.run(endings.pickled, 0)
        assert lines[0].startswith("optimizer: TypeError: AdamW cannot be copied or pickled")
        assert "To move a run, copy the directory" in lines[0]
        assert lines[1].startswith("handle: TypeError: SealHandle cannot be copied or pickled")
        assert "result().path" in lines[1]
        assert lines[2:] == ["went on to 3"]
        assert program.newest() == 3
