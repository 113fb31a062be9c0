"""Each call of opening, restoring, recycling and verifying fails once, with errors that pass.

A drive that hesitates, a limit of open files, a permission that is restored in a minute: such an
error says nothing about what is on the drive. It may stop what was asked for, by name. It must not
make anybody go on from an older checkpoint, mark a whole one as damaged, or change anything.

With ``make campaign NAME=crash`` every call fails with one of the errors, in turn, and otherwise
one in `STRIDE` calls does. ``ENVIRONMENT_ERRORS=all`` lets each fail with each of them.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from gds import MemoryBackend, StorageError, WrapperBackend
from gds.contract import Stat
from offload import AdamW, OffloadError, list_checkpoints, load_parameters, open_checkpoint
from offload.errors import CheckpointError, SealError, StoreError, UnreadableError
from offload.store.maintenance.pruning import prune
from tests.campaigns import FULL
from tests.crash.fault_backend import FaultBackend, Kind
from tests.stores.files import everything, write
from tests.stores.training import (
    Model,
    Reference,
    backward,
    differences,
    optimizer_for,
    options,
    same_bits,
    train,
)

STORE, OTHER = "/data/run", "/fast/run"
NUMBERS = (
    errno.EIO,
    errno.EMFILE,
    errno.ENOMEM,
    errno.EACCES,
    errno.ESTALE,
    errno.ENFILE,
    errno.EINTR,
)
ALL = os.environ.get("ENVIRONMENT_ERRORS") == "all"
STRIDE = 1 if ALL or FULL else 8

SEALED = 4
"""The newest checkpoint of the store that everything begins with."""

KEEP = 2
"""Of the runs that open it; it has been kept more, so that there is something to withdraw."""


@functools.cache
def reference() -> Reference:
    return Reference()


@functools.cache
def template(num_drives: int) -> tuple[tuple[str, bytes | None], ...]:
    """Return what is in a store with checkpoints, a pin, a free slot and a slot that was left."""
    backend = MemoryBackend()
    model = Model()
    with optimizer_for(model, directories(num_drives), options(backend), keep=SEALED) as optimizer:
        train(model, optimizer, *range(1, SEALED + 1))
        optimizer.pin("first", 1)
        backward(model, SEALED + 1)
        optimizer.step()
    return tuple(everything(backend.reopened()).items())


def directories(num_drives: int) -> list[str]:
    return [STORE, OTHER][:num_drives]


def store_of(num_drives: int) -> MemoryBackend:
    """Return that store, for one run."""
    backend = MemoryBackend()
    for path, data in template(num_drives):
        if data is None:
            backend.make_dir(path)
        else:
            write(backend, path, data)
    return backend


class Run:
    """A store, what fails in it, and what was promised about it."""

    def __init__(self, num_drives: int) -> None:
        self.inner = store_of(num_drives)
        self.backend = FaultBackend(self.inner)
        self.directories = directories(num_drives)
        self.acknowledged = SEALED
        self.model = Model(history=9)
        self.optimizer: AdamW | None = None

    def construct(self) -> None:
        """Open the store as training does."""
        self.optimizer = optimizer_for(
            self.model, self.directories, options(self.backend), keep=KEEP
        )

    def restore(self) -> None:
        """Restore the newest, and nothing else."""
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
        model = Model(history=8)
        assert load_parameters(model, STORE, backend=self.backend) == SEALED
        with open_checkpoint(STORE, backend=self.backend) as found:
            assert found.step == SEALED
            assert found.train_state == {"step": SEALED}
            assert found.verify().problems == ()
        infos = list_checkpoints(STORE, backend=self.backend)
        assert [info.reason for info in infos] == [""] * SEALED
        with_pins = {info.step: info.pins for info in infos if info.pins}
        assert with_pins == {1: ("first",)}
        others = self.directories[1:] or None
        report = prune(STORE, dry_run=True, parts=others, backend=self.backend)
        assert report.refused == ()

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
        names = [n for n in successor.list_dir(STORE) if n.startswith("step-")]
        for name in names:
            assert "damaged.txt" not in successor.list_dir(f"{STORE}/{name}"), name
        model = Model(history=7)
        with optimizer_for(model, self.directories, options(successor), keep=KEEP) as optimizer:
            found = optimizer.restore()
            assert found is not None
            assert found.step >= self.acknowledged, "an acknowledged checkpoint is lost"
            last = found.step + 2
            train(model, optimizer, *range(found.step + 1, last + 1), seal=False)
            optimizer.checkpoint({"step": last}).result()
        assert same_bits(dict(model.state_dict()), reference().after(last).model)
        with open_checkpoint(STORE, backend=successor) as newest:
            assert differences(newest, successor, reference().after(last)) == []
        with open_checkpoint(f"{STORE}/step-00000001", backend=successor) as pinned:
            assert differences(pinned, successor, reference().after(1)) == []


@dataclass(frozen=True)
class Phase:
    """What a call is part of, and what comes before it."""

    name: str
    before: Sequence[Callable[[Run], None]]
    during: Callable[[Run], None]

    stays: str | None = None
    """If it fails, everything stays as it was whose path has this in it; None for nothing."""


PHASES = (
    Phase("opening", (), Run.construct, stays=""),
    Phase("restoring", (Run.construct,), Run.restore, stays="/step-"),  # parts may be trimmed
    Phase("recycling", (Run.construct, Run.restore), Run.recycle),
    Phase("verifying", (), Run.read, stays=""),
)


def run_phase(phase: Phase, num_drives: int, nth: int, number: int) -> tuple[Run, Kind | None]:
    """Let the nth call within a phase fail; returns what kind it was, None if there was none."""
    run = Run(num_drives)
    failed: list[tuple[Kind, str]] = []
    count = 0

    def chosen(kind: Kind, path: str) -> bool:
        nonlocal count
        count += 1
        if count == nth:
            failed.append((kind, path))
        return count == nth

    try:
        for step in phase.before:
            step(run)
        before = run.what_is_there(phase.stays)
        run.backend.fail_if(chosen, number)
        with warnings.catch_warnings():
            # Of a slot that is not reused after a failed sync; never of a checkpoint.
            warnings.filterwarnings("ignore", "(?s).*reuses no slot any more", RuntimeWarning)
            error = named_error(lambda: phase.during(run))
        run.backend.repair()
        if error is not None:
            assert failed, "there was no fault"
            assert os.strerror(number) in str(error), error
            assert run.what_is_there(phase.stays) == before
            if phase.name == "opening":
                assert isinstance(error, StoreError), error
                assert "fresh=True" not in str(error)
            assert not isinstance(error, CheckpointError), error
        elif phase.name == "opening":
            run.restore()  # the newest is not left out, where the error was not worth a word
        run.close()
        if failed:
            run.assert_nothing_is_lost()
    except BaseException as problem:
        problem.add_note(f"{phase.name}, call {nth}: {failed}, {errno.errorcode[number]}")
        raise
    return run, failed[0][0] if failed else None


def named_error(call: Callable[[], object]) -> Exception | None:
    """Return the error that a call raises; one that is not meant for users passes through."""
    try:
        call()
    except (OffloadError, StorageError) as error:
        return error
    return None


@pytest.mark.parametrize("num_drives", [1, 2])
@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.name)
def test_an_error_that_passes_costs_no_checkpoint(
    phase: Phase, num_drives: int, record_property: Callable[[str, object], None]
) -> None:
    num_faults, nth = 0, 1 - STRIDE
    kinds: dict[Kind, int] = {}
    while True:
        nth += STRIDE
        for number in NUMBERS if ALL else NUMBERS[nth % len(NUMBERS) :][:1]:
            _, kind = run_phase(phase, num_drives, nth, number)
            if kind is not None:
                num_faults += 1
                kinds[kind] = kinds.get(kind, 0) + 1
        if kind is None:
            break
    print(f"{phase.name}, {num_drives} drives: {num_faults} faults, {kinds}")
    record_property("faults", num_faults)
    wanted: dict[str, set[Kind]] = {
        "opening": {"stat", "list_dir", "open", "read_bytes", "lock", "sync_dir", "capabilities"},
        "restoring": {"stat", "open", "read", "read_bytes"},
        "recycling": {"stat", "list_dir", "lock", "rename", "sync", "remove", "write", "read"},
        "verifying": {"stat", "list_dir", "open", "read", "read_bytes", "lock"},
    }
    assert num_faults > 4
    assert STRIDE > 1 or kinds.keys() >= wanted[phase.name]


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: errno.errorcode[number])
@pytest.mark.parametrize("where", ["manifest.json", "model.safetensors", "exp_avg.safetensors"])
def test_the_error_says_what_to_do(number: int, where: str) -> None:
    run = Run(1)
    path = f"{STORE}/step-0000000{SEALED}/{where}"
    run.backend.fail_if(lambda kind, found: kind == "open" and found == path, number)
    with pytest.raises(UnreadableError) as error:
        run.construct()
    assert isinstance(error.value, StoreError)
    assert isinstance(error.value, StorageError)
    assert (error.value.errno, error.value.filename) == (number, path)
    said = str(error.value)
    assert "so it is not known whether its content is damaged" in said
    assert "try again" in said
    assert f"If it stays unreadable, move {STORE}/step-0000000{SEALED} out of the store" in said
    assert "No checkpoint has been changed" in said
    assert ("ulimit -n" in said) == (number == errno.EMFILE)
    assert ("dmesg" in said) == (number == errno.EIO)
    for reader in (
        lambda: open_checkpoint(STORE, backend=run.backend).close(),
        lambda: load_parameters(Model(), STORE, backend=run.backend),
        lambda: list_checkpoints(STORE, backend=run.backend),
    ):
        run.backend.fail_if(lambda kind, found: kind == "open" and found == path, number)
        with pytest.raises(UnreadableError, match="not known whether its content is damaged"):
            reader()
    run.construct()
    run.restore()
    run.close()


OF_CONTENT = ("ENOENT", "ENOTDIR", "ELOOP", "EISDIR", "ENODATA", "ENXIO", "ENAMETOOLONG")


@pytest.mark.parametrize("name", OF_CONTENT)
@pytest.mark.parametrize("where", ["manifest.json", "model.safetensors", "exp_avg.safetensors"])
def test_what_says_something_about_the_content_is_refused(name: str, where: str) -> None:
    """A file that is gone, or is shorter than it was when it was looked at, or is a link by now."""
    run = Run(1)
    newest = f"{STORE}/step-0000000{SEALED}"
    number = getattr(errno, name)
    kind = "read_bytes" if name == "ENODATA" else "open"
    run.backend.fail_if(lambda k, path: k == kind and path == f"{newest}/{where}", number)
    run.construct()
    assert run.optimizer is not None
    with pytest.warns(RuntimeWarning, match=f"not using {newest}: .*{os.strerror(number)}"):
        found = run.optimizer.restore()
    assert found is not None
    assert found.step == SEALED - 1
    run.backend.fail_if(lambda k, path: k == kind and path == f"{newest}/{where}", number)
    infos = list_checkpoints(STORE, backend=run.backend)
    assert [info.valid for info in infos] == [True, True, True, False]
    run.close()


def test_a_fresh_start_beside_what_could_not_be_read_is_refused_as_well() -> None:
    run = Run(1)
    path = f"{STORE}/step-0000000{SEALED}/manifest.json"
    run.backend.fail_if(lambda kind, found: kind == "open" and found == path, errno.EIO)
    with pytest.raises(UnreadableError):
        optimizer_for(Model(), STORE, options(run.backend), fresh=True)
    run.assert_nothing_is_lost()
    run.close()


def test_a_pin_that_could_not_be_read_stops_the_opening_and_keeps_everything_later() -> None:
    run = Run(1)
    pin = f"{STORE}/pins/first"
    run.backend.fail_if(lambda kind, path: kind == "open" and path == pin, errno.EMFILE)
    with pytest.raises(UnreadableError, match="ulimit -n") as error:
        run.construct()
    assert "unpin" not in str(error.value), "it may be whole"
    run.construct()
    run.restore()
    run.recycle()
    run.close()
    run.assert_nothing_is_lost()


class _Recycling(WrapperBackend):
    """The newest checkpoint is withdrawn at the moment at which a reader opens a file of it."""

    def __init__(self, inner: MemoryBackend, withdraw: Callable[[], None], again: str) -> None:
        super().__init__(inner)
        self._withdraw = withdraw
        self._again = again
        self.num_withdrawn = 0

    def stat(self, path: str) -> Stat | None:
        found = super().stat(path)
        if path.endswith(f"step-0000000{SEALED}/{self._again}") and not self.num_withdrawn:
            self.num_withdrawn = 1
            self._withdraw()
        return found


@pytest.mark.parametrize("replaced", [False, True], ids=["gone", "another-in-its-place"])
@pytest.mark.parametrize("at", ["manifest.json", "model.safetensors", "exp_avg_sq.safetensors"])
def test_a_checkpoint_that_is_recycled_while_it_is_looked_at_is_not_warned_of(
    at: str, replaced: bool
) -> None:
    """Beside training that is no damage; warnings are errors here."""
    inner = store_of(1)
    newest = f"{STORE}/step-0000000{SEALED}"

    def withdraw() -> None:
        inner.rename(newest, f"{STORE}/.slot-9")
        manifest = inner.open(f"{STORE}/.slot-9/manifest.json", writable=True)
        manifest.write_bytes(b'{"format": 2, "invalid": "x"}'.ljust(100), 0)
        manifest.close()
        if replaced:
            inner.make_dir(newest)  # by somebody who restores a backup, file by file

    backend = _Recycling(inner, withdraw, at)
    with open_checkpoint(STORE, backend=backend) as found:
        assert found.step == SEALED - 1
    assert backend.num_withdrawn == 1


def test_what_is_damaged_is_still_warned_of_and_what_is_older_is_not() -> None:
    inner = store_of(1)
    for step in (2, SEALED):
        inner.remove(f"{STORE}/step-0000000{step}/exp_avg.safetensors")
    with (
        pytest.warns(RuntimeWarning, match="exp_avg.safetensors: missing") as caught,
        open_checkpoint(STORE, backend=inner) as found,
    ):
        assert found.step == SEALED - 1
    assert [f"step-0000000{SEALED}" in str(w.message) for w in caught] == [True]
    model = Model()
    with pytest.warns(RuntimeWarning, match=f"not using {STORE}/step-0000000{SEALED}: "):
        assert load_parameters(model, STORE, backend=inner) == SEALED - 1
    assert same_bits(dict(model.state_dict()), reference().after(SEALED - 1).model)
