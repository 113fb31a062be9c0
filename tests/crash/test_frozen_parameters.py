"""Losses of power, kills and failures where a seal believes what a slot holds already.

A seal of a model that is mostly frozen writes little: it goes by what this process has written, by
what it reads back of an earlier one's slots, and it clones. None of that may be believed too much.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial

import pytest
import torch

from gds import Buffer, File, IOFuture, MemoryBackend, StorageError, WrapperBackend
from gds.backends.wrapper import WrapperFile
from offload import OffloadError, open_checkpoint
from offload.errors import SealError
from offload.format.digests import DigestContext
from offload.format.header import build_header
from offload.format.known_leaves import KnownLeaves
from offload.model.model_file import BlockBuffers, ModelImage
from offload.model.model_writing import write_model
from tests.crash.crash_backend import CrashBackend, Disk, Image, Operation
from tests.crash.fault_backend import FaultBackend
from tests.crash.late import Late
from tests.stores.frozen_model import (
    BLOCK,
    STORE,
    Process,
    Reference,
    differences,
    make_units_small,
)

SEED = int(os.environ.get("CRASH_SEED", "20260711"))
KEEP = 2
EDITED = 4
"""The step before which a frozen tensor is edited."""

LAST_STEP = 5
AFTERWARDS = 3
"""Seals of a process that follows: all slots are written."""


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    make_units_small(monkeypatch)


@pytest.fixture(params=[False, True], ids=["", "clones"])
def clones(request: pytest.FixtureRequest) -> bool:
    return request.param


class Noted(Process):
    """Notes in the log which checkpoints may be the newest from then on; 0 stands for none."""

    def train(self, last_step: int) -> None:
        while self.step_number < last_step:
            if self.step_number + 1 == EDITED:
                self.edit("base", 20_000, 7.0)
            self.step()
            self.seal_and_note()

    def seal_and_note(self) -> None:
        assert isinstance(self.backend, CrashBackend)
        self.backend.note({self.step_number - 1, self.step_number})
        self.check(self.seal())
        self.backend.note({self.step_number})


def reference_at(step: int, *, edited: bool = True) -> Reference:
    reference = Reference()
    for number in range(1, step + 1):
        if edited and number == EDITED:
            reference.model.base.data[20_000] = 7.0
        reference.step(number)
    return reference


def recorded(clones: bool) -> CrashBackend:
    backend = CrashBackend(clones=clones)
    run = Noted(backend, keep=KEEP)
    run.train(LAST_STEP)
    run.close()
    return backend


def allowed_at(log: Sequence[Operation]) -> Iterator[set[int]]:
    allowed = {0}
    for operation in log:
        if operation.kind == "note":
            allowed = operation.label
        yield allowed


def check(image: Image, allowed: set[int], *, clones: bool, finish: bool) -> None:
    """Open what a loss of power has left: all of it is whole, and the training goes on."""
    backend = CrashBackend.after(image, clones=clones)
    newest = 0
    if any(name.startswith("step-") for name in names_in(backend)):
        with open_checkpoint(STORE, backend=backend) as found:
            newest = found.step
            assert differences(found, reference_at(newest).after[newest]) == []
    assert newest in allowed
    if finish:
        run = Noted(backend, reference_at(newest), keep=KEEP)
        assert run.step_number == newest
        run.train(newest + AFTERWARDS)
        run.close()


def names_in(backend: CrashBackend) -> list[str]:
    return backend.list_dir(STORE) if backend.stat(STORE) is not None else []


def test_power_lost_after_any_operation(
    clones: bool, record_property: Callable[[str, object], None]
) -> None:
    log = recorded(clones).log
    rng = random.Random(f"{SEED}/frozen/{clones}")
    disk, seen, num_cuts = Disk(), set(), 0
    for operation, allowed in zip(log, allowed_at(log), strict=True):
        disk.apply(operation)
        num_cuts += 1
        image = disk.power_cut(rng)
        if (state := (hash(image), frozenset(allowed))) in seen:
            continue
        seen.add(state)
        try:
            check(image, allowed, clones=clones, finish=len(seen) % 8 == 0)
        except BaseException as error:
            error.add_note(f"CRASH_SEED={SEED}: power lost after {operation}; allowed {allowed}")
            raise
    record_property("crash_cuts", num_cuts)
    record_property("crash_states", len(seen))
    record_property("crash_seed", SEED)
    assert len(seen) > len(log) // 3


def test_what_a_killed_process_left_in_the_cache_is_durable_when_it_is_believed(
    clones: bool, record_property: Callable[[str, object], None]
) -> None:
    """A seal that finds the right bytes in a slot does not write them: its sync covers them."""
    log = recorded(clones).log
    rng = random.Random(f"{SEED}/frozen/killed/{clones}")
    writes = [
        n
        for n, operation in enumerate(log, 1)
        if operation.kind == "write" and "model.safetensors" in operation.path
    ]
    killed = sorted({*rng.sample(writes, 8), *rng.sample(range(len(log)), 4)})
    num_cuts = 0
    for killed_after in killed:
        before = list(allowed_at(log[:killed_after]))[-1:] or [{0}]
        backend = CrashBackend.resumed(log[:killed_after], clones=clones)
        newest = 0
        if any(name.startswith("step-") for name in names_in(backend)):
            with open_checkpoint(STORE, backend=backend) as found:
                newest = found.step
        assert newest in before[0]
        backend.note({newest})
        run = Noted(backend, reference_at(newest), keep=KEEP)
        run.train(newest + AFTERWARDS)
        run.close()
        disk = Disk()
        later = range(killed_after + 2, len(backend.log) + 1)
        cuts = {len(backend.log), *rng.sample(later, 4)}
        allowed = allowed_at(backend.log)
        for number, operation in enumerate(backend.log, 1):
            disk.apply(operation)
            may_be = next(allowed)
            if number in cuts:
                num_cuts += 1
                # All that was not synced is gone, or any of it.
                for choice in (random.Random(0), rng):
                    check(disk.power_cut(choice), may_be, clones=clones, finish=False)
    record_property("crash_cuts", num_cuts)
    record_property("crash_states", num_cuts)


@pytest.mark.parametrize("kind", ["read", "write", "write_bytes", "sync", "open", "read_bytes"])
def test_any_operation_may_fail_in_the_process_that_follows(
    kind: str, clones: bool, record_property: Callable[[str, object], None]
) -> None:
    """No error, or a named one; and what was sealed is whole, in this process and the next one."""
    num_faults = 0
    for nth in range(1, 1000):
        first = MemoryBackend(clones=clones)
        run = Process(first, keep=KEEP)
        for _ in range(3):
            run.step()
            run.seal()
        run.step()
        run.close()
        backend = FaultBackend(first.reopened())
        run = Process(backend, reference_at(3, edited=False), keep=KEEP)
        backend.fail(kind, nth, forever=False)
        sealed = 3
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            try:
                for _ in range(AFTERWARDS):
                    run.step()
                    sealed = run.seal().step
            except (OffloadError, StorageError):
                assert backend.num_failed
            for _ in range(2):
                try:
                    run.optimizer.restore()
                    break
                except (OffloadError, StorageError):
                    assert backend.num_failed
            try:
                run.close()
            except SealError:
                assert backend.num_failed
        backend.repair()
        with open_checkpoint(STORE, backend=backend.inner) as found:
            assert found.step >= sealed
            assert (
                differences(found, reference_at(found.step, edited=False).after[found.step]) == []
            )
            newest = found.step
        again = Process(backend.inner.reopened(), reference_at(newest, edited=False), keep=KEEP)
        for _ in range(AFTERWARDS):
            again.step_and_seal()
        again.close()
        if not backend.num_failed:
            break
        num_faults += 1
    record_property("faults", num_faults)
    assert num_faults


class FailingFile(WrapperFile):
    """Its second write fails; those before and after it are done when they are waited for."""

    def __init__(self, inner: File) -> None:
        super().__init__(inner)
        self.writes: list[Future[int]] = []

    def write(self, source: Buffer, offset: int) -> IOFuture:
        future: Future[int] = Late(lambda: self.inner.write(source, offset))
        if len(self.writes) == 1:
            future = Future()
            future.set_exception(StorageError(5, "injected failure of write", self.path))
        self.writes.append(future)
        return future


def test_no_write_is_under_way_any_more_when_a_seal_has_failed() -> None:
    """One that came late would overwrite what the next seal puts there."""
    backend = MemoryBackend()
    live = torch.arange(4 * BLOCK // 4, dtype=torch.float32)
    header = build_header([("x", "F32", tuple(live.shape))])
    file = FailingFile(backend.create("/model", header.file_bytes))
    buffers = BlockBuffers(backend, header.file_bytes)
    image, context = ModelImage(header, {"x": live}), DigestContext("store", 1)
    known = KnownLeaves(readable=False)
    with pytest.raises(StorageError, match="injected failure of write"):
        write_model(image, file, buffers, context, known, lambda _: None)
    assert len(file.writes) > 2
    assert all(write.done() for write in file.writes)


class LateReads(WrapperBackend):
    """Reads of model files are done when they are waited for; while `are_bad` they fail then."""

    are_bad = False

    def wrap_file(self, file: File) -> File:
        return _LateReadsFile(file, self)


class _LateReadsFile(WrapperFile):
    def __init__(self, inner: File, backend: LateReads) -> None:
        super().__init__(inner)
        self._backend = backend

    def read(self, into: Buffer, offset: int) -> IOFuture:
        return self._late(self.inner.read, into, offset)

    def read_again(self, into: Buffer, offset: int, *, direct: bool) -> IOFuture:
        return self._late(partial(self.inner.read_again, direct=direct), into, offset)

    def _late(self, read: Callable[[Buffer, int], IOFuture], into: Buffer, offset: int) -> IOFuture:
        if not self.path.endswith("model.safetensors"):
            return read(into, offset)
        at = self.size_bytes if self._backend.are_bad else offset  # where there is nothing
        return Late(lambda: read(into, at))


def test_what_is_read_back_late_and_fails_is_written() -> None:
    first = MemoryBackend()
    run = Process(first, keep=KEEP)
    for _ in range(4):
        run.step_and_seal()
    run.close()
    backend = LateReads(first.reopened())
    run = Process(backend, reference_at(4, edited=False), keep=KEEP)
    for tensor in (run.model.base, run.reference.model.base):
        tensor.data[::100] += 1  # so that little of what is in the slots is right
    for _ in range(3):
        run.step()
        backend.are_bad = True
        checkpoint = run.seal()
        backend.are_bad = False
        run.check(checkpoint)
    run.close()
