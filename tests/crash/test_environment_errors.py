"""Each call of opening, restoring, recycling and verifying fails once, with errors that pass.

A drive that hesitates, a limit of open files, a permission that is restored in a minute: such an
error says nothing about what is on the drive. It may stop what was asked for, by name. It must not
make anybody go on from an older checkpoint, mark a whole one as damaged, or change anything.

With ``FULL_TESTS=1`` every call fails with one of the errors, in turn, and otherwise one in
`STRIDE` calls does. ``ENVIRONMENT_ERRORS=all`` lets each fail with each of them.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import pytest

from gds import StorageError
from offload import (
    AdamW,
    CheckpointError,
    OffloadError,
    SealError,
    StoreError,
    UnreadableError,
    list_checkpoints,
    load_parameters,
    open_checkpoint,
)
from offload.store import prune
from tests.campaigns import FULL
from tests.crash.crash_backend import Image
from tests.crash.fault_backend import FaultBackend, Kind
from tests.stores.files import everything
from tests.stores.training import (
    Model,
    Reference,
    backward,
    differences,
    optimizer_for,
    options,
    take_step,
    train,
)

STORE, OTHER = "/data/run", "/fast/run"
NUMBERS = [
    getattr(errno, name)
    for name in ("EIO", "EMFILE", "ENOMEM", "EACCES", "ESTALE", "ENFILE", "EINTR")
]
ALL = os.environ.get("ENVIRONMENT_ERRORS") == "all"
STRIDE = 1 if ALL or FULL else 100

SEALED = 4
"""The newest checkpoint of the store that everything begins with."""

NEWEST = f"{STORE}/step-0000000{SEALED}"
KEEP = 2
"""Of the runs that open it; it has been kept more, so that there is something to withdraw."""

reference = functools.cache(Reference)


@functools.cache
def template(num_drives: int) -> Image:
    """Return a store with checkpoints, a pin, a free slot and a slot that was left."""
    backend = Image((), ()).backend()
    model = Model()
    with optimizer_for(model, directories(num_drives), options(backend), keep=SEALED) as optimizer:
        train(model, optimizer, *range(1, SEALED + 1))
        optimizer.pin("first", 1)
        take_step(model, optimizer, SEALED + 1)
    return Image.of(backend.reopened())


def directories(num_drives: int) -> list[str]:
    return [STORE, OTHER][:num_drives]


class Run:
    """A store, what fails in it, and what was promised about it."""

    def __init__(self, num_drives: int = 1) -> None:
        self.inner = template(num_drives).backend()
        self.backend = FaultBackend(self.inner)
        self.directories = directories(num_drives)
        self.acknowledged = SEALED
        self.model = Model(history=9)
        self.optimizer: AdamW | None = None

    def fail(self, kind: Kind, path: str, number: int) -> None:
        self.backend.fail_if(lambda *found: found == (kind, path), number)

    def construct(self) -> None:
        settings = options(self.backend)
        self.optimizer = optimizer_for(self.model, self.directories, settings, keep=KEEP)

    def restore(self) -> None:
        assert self.optimizer is not None
        found = self.optimizer.restore()
        assert found is not None
        assert found.step >= self.acknowledged, "another one was taken"

    def recycle(self) -> None:
        """Take steps and seal them, so that old slots are withdrawn, adopted and trimmed."""
        assert self.optimizer is not None
        for _ in range(3):
            step = self.optimizer.num_steps + 1
            backward(self.model, step)
            self.optimizer.step()
            self.acknowledged = self.optimizer.checkpoint({"step": step}).result().step

    def read(self) -> None:
        """Do everything that readers do, with the newest and with all."""
        assert load_parameters(Model(history=8), STORE, backend=self.backend) == SEALED
        with open_checkpoint(STORE, backend=self.backend) as found:
            assert (found.step, found.train_state) == (SEALED, {"step": SEALED})
            assert found.verify().problems == ()
        infos = list_checkpoints(STORE, backend=self.backend)
        assert [info.reason for info in infos] == [""] * SEALED
        assert [info.pins for info in infos] == [("first",), *[()] * (SEALED - 1)]
        others = self.directories[1:] or None
        assert prune(STORE, dry_run=True, parts=others, backend=self.backend).refused == ()

    def what_is_there(self, part_of_path: str | None) -> dict[str, bytes | None]:
        """Return everything with such a path; nothing for None."""
        if part_of_path is None:
            return {}
        return {p: d for p, d in everything(self.inner).items() if part_of_path in p}

    def close(self) -> None:
        """Let go of the store, whatever has failed."""
        self.backend.repair()
        if self.optimizer is not None:
            with contextlib.suppress(SealError):
                self.optimizer.close()
        self.backend.close()

    def assert_nothing_is_lost(self) -> None:
        """The next process goes on from what was acknowledged, to the bits of plain torch."""
        successor = self.inner.reopened()
        assert not [path for path in everything(successor) if path.endswith("damaged.txt")]
        model = Model(history=7)
        with optimizer_for(model, self.directories, options(successor), keep=KEEP) as optimizer:
            found = optimizer.restore()
            assert found is not None
            assert found.step >= self.acknowledged, "an acknowledged checkpoint is lost"
            last = found.step + 2
            train(model, optimizer, last - 1, last, seal=False)
            newest = optimizer.checkpoint({"step": last}).result()
            assert differences(newest, successor, reference().after(last)) == []
        with open_checkpoint(f"{STORE}/step-00000001", backend=successor) as pinned:
            assert differences(pinned, successor, reference().after(1)) == []


@dataclass(frozen=True)
class Phase:
    """What a call is part of, and what comes before it."""

    name: str
    before: Sequence[Callable[[Run], None]]
    during: Callable[[Run], None]

    stays: str | None
    """If it fails, everything stays as it was whose path has this in it; None for nothing."""

    kinds: str
    """Kinds of calls that fail among others, if each call does."""


PHASES = [
    Phase("opening", (), Run.construct, "", "stat list_dir open read_bytes lock sync_dir"),
    Phase("restoring", (Run.construct,), Run.restore, "/step-", "stat open read read_bytes"),
    Phase("recycling", (Run.construct, Run.restore), Run.recycle, None, "stat lock rename sync"),
    Phase("verifying", (), Run.read, "", "stat list_dir open read read_bytes lock"),
]


def run_phase(phase: Phase, num_drives: int, nth: int, number: int) -> Kind | None:
    """Let the nth call within a phase fail; returns what kind it was, None if there was none."""
    run = Run(num_drives)
    failed: list[tuple[Kind, str]] = []
    calls = count(1)

    def chosen(kind: Kind, path: str) -> bool:
        is_due = next(calls) == nth
        failed.extend([(kind, path)] * is_due)
        return is_due

    try:
        for step in phase.before:
            step(run)
        before = run.what_is_there(phase.stays)
        run.backend.fail_if(chosen, number)
        error: Exception | None = None
        with warnings.catch_warnings():
            # Of a slot that is not reused after a failed sync; never of a checkpoint.
            warnings.filterwarnings("ignore", "(?s).*reuses no slot any more", RuntimeWarning)
            try:
                phase.during(run)
            except (OffloadError, StorageError) as raised:
                error = raised
        run.backend.repair()
        if error is not None:
            assert failed, "there was no fault"
            assert os.strerror(number) in str(error), error
            assert run.what_is_there(phase.stays) == before
            if phase.name == "opening":
                assert isinstance(error, StoreError), error
                assert "fresh=True" not in str(error)
                if number != errno.EACCES:  # which may be for somebody to change
                    assert str(error).count("No checkpoint has been changed") == 1, error
                run.construct()  # the same again: nothing is left locked
            assert not isinstance(error, CheckpointError), error
        elif phase.name == "opening":
            run.restore()  # the newest is not left out, where the error was not worth a word
        run.close()
        if failed:
            run.assert_nothing_is_lost()
    except BaseException as problem:
        problem.add_note(f"{phase.name}, call {nth}: {failed}, {errno.errorcode[number]}")
        raise
    return failed[0][0] if failed else None


@pytest.mark.parametrize("num_drives", [1, 2])
@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.name)
def test_an_error_that_passes_costs_no_checkpoint(
    phase: Phase, num_drives: int, record_property: Callable[[str, object], None]
) -> None:
    kinds: list[Kind] = []
    for nth in count(1 + num_drives, STRIDE) if STRIDE > 1 else count(1):
        numbers = NUMBERS if ALL else [NUMBERS[nth % len(NUMBERS)]]
        found = [run_phase(phase, num_drives, nth, number) for number in numbers]
        kinds += [kind for kind in found if kind is not None]
        if None in found:
            break
    record_property("faults", len(kinds))
    assert kinds
    assert STRIDE > 1 or {*phase.kinds.split()} <= {*kinds}


FILES = ("manifest.json", "model.safetensors", "exp_avg.safetensors")


@pytest.mark.parametrize("number", NUMBERS, ids=errno.errorcode.get)
def test_the_error_says_what_to_do(number: int) -> None:
    run = Run()
    path = f"{NEWEST}/{FILES[number % 3]}"
    for call in (
        run.construct,
        lambda: open_checkpoint(STORE, backend=run.backend).close(),
        lambda: load_parameters(Model(), STORE, backend=run.backend),
        lambda: list_checkpoints(STORE, backend=run.backend),
        lambda: optimizer_for(Model(), STORE, options(run.backend), fresh=True),
    ):
        run.fail("open", path, number)
        with pytest.raises(UnreadableError) as error:
            call()
        said = str(error.value)
        assert (error.value.errno, error.value.filename) == (number, path)
        assert "so it is not known whether its content is damaged" in said
        assert "try again" in said
        assert ("ulimit -n" in said) == (number == errno.EMFILE)
        assert ("dmesg" in said) == (number == errno.EIO)
        if call == run.construct:
            assert isinstance(error.value, StoreError)
            assert f"If it stays unreadable, move {NEWEST} out of the store" in said
            assert "No checkpoint has been changed" in said
    run.construct()
    run.restore()
    run.close()
    run.assert_nothing_is_lost()


OF_CONTENT = ("ENOENT", "ENOTDIR", "ELOOP", "EISDIR", "ENODATA", "ENXIO", "ENAMETOOLONG")


@pytest.mark.parametrize(("name", "where"), [(n, FILES[k % 3]) for k, n in enumerate(OF_CONTENT)])
def test_what_says_something_about_the_content_is_refused(name: str, where: str) -> None:
    """A file that is gone, or is shorter than it was when it was looked at, or is a link by now."""
    run = Run()
    number = getattr(errno, name)
    kind: Kind = "read_bytes" if name == "ENODATA" else "open"
    run.fail(kind, f"{NEWEST}/{where}", number)
    run.construct()
    assert run.optimizer is not None
    with pytest.warns(RuntimeWarning, match=f"not using {NEWEST}: .*{os.strerror(number)}"):
        found = run.optimizer.restore()
    assert found is not None
    assert found.step == SEALED - 1
    run.fail(kind, f"{NEWEST}/{where}", number)
    infos = list_checkpoints(STORE, backend=run.backend)
    assert [info.valid for info in infos] == [True, True, True, False]
    run.close()
