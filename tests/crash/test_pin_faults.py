"""Every operation of pinning fails in turn: the name keeps what it kept, or what it was to keep."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable

import pytest

import offload
from gds import MemoryBackend, StorageError
from offload import OffloadError, list_checkpoints, open_checkpoint
from tests.crash.fault_backend import KINDS, FaultBackend, Kind
from tests.stores.training import Model, Reference, backward, differences, optimizer_for, options

STORE = "/run"
LAST_STEP = 3


def moved(_: FaultBackend, optimizer: offload.AdamW) -> None:
    optimizer.pin("best")


def moved_from_outside(backend: FaultBackend, _: offload.AdamW) -> None:
    offload.pin(f"{STORE}/step-00000002", "best", backend=backend)


def removed(_: FaultBackend, optimizer: offload.AdamW) -> None:
    optimizer.unpin("best")


def removed_from_outside(backend: FaultBackend, _: offload.AdamW) -> None:
    offload.unpin(STORE, "best", backend=backend)


CHANGING: tuple[Kind, ...] = ("sync", "sync_dir", "rename", "create", "remove")
"""What is tried of another process, which reads as the one that trains does."""

Change = Callable[[FaultBackend, offload.AdamW], None]
CHANGES: dict[Change, int | None] = {
    moved: 2,
    moved_from_outside: 2,
    removed: None,
    removed_from_outside: None,
}
"""What is done to the pin of step 1 while step 2 is the newest, and the step that it has then."""


@functools.cache
def reference() -> Reference:
    return Reference()


def pinned(backend: FaultBackend) -> int | None:
    """The step that has the pin; every checkpoint with one is whole."""
    found = [info for info in list_checkpoints(STORE, backend=backend.inner) if info.pins]
    for info in found:
        with open_checkpoint(info.path, backend=backend.inner) as checkpoint:
            assert differences(checkpoint, backend.inner, reference().after(info.step)) == []
    assert len(found) <= 1
    return found[0].step if found else None


def trained_with_a_fault(change: Change, kind: Kind, nth: int) -> FaultBackend:
    """Train to the last step; one operation of changing the pin at step 2 fails."""
    backend, model = FaultBackend(MemoryBackend()), Model()
    after = CHANGES[change]
    optimizer = optimizer_for(model, STORE, options(backend), keep=1)
    reported = False
    for step in range(1, LAST_STEP + 1):
        backward(model, step)
        optimizer.step()
        optimizer.checkpoint({"step": step}).result()
        if step == 1:
            optimizer.pin("best")
        if step == 2:
            backend.fail(kind, nth, forever=False)
            try:
                change(backend, optimizer)
            except (OffloadError, StorageError):
                reported = True
            backend.repair()
            assert reported or not backend.num_failed, "a failure is not passed over"
            assert all(name == "best" for name in backend.inner.list_dir(f"{STORE}/pins"))
            assert pinned(backend) in ((1, after) if reported else (after,))
    kept = pinned(backend)
    assert kept in ((1, after) if reported else (after,))
    optimizer.close()
    backend.inner = backend.inner.reopened()
    backend.new_process()
    with optimizer_for(Model(), STORE, options(backend), keep=1) as optimizer:
        assert optimizer.restore().step == LAST_STEP
        assert pinned(backend) == kept
        with contextlib.suppress(offload.OffloadError):
            optimizer.unpin("best")
        moved(backend, optimizer)  # nothing that was left behind is in the way
        assert pinned(backend) == LAST_STEP
    if change in (moved, removed):  # of another process this one need not know
        assert backend.violations == []
    return backend


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_any_operation_of_pinning_may_fail(change: Change) -> None:
    num_faults = 0
    with warnings.catch_warnings():
        # After a failed sync the store says that it reuses no slot.
        warnings.simplefilter("ignore", RuntimeWarning)
        for kind in KINDS if change in (moved, removed) else CHANGING:
            for nth in range(1, 20):
                backend = trained_with_a_fault(change, kind, nth)
                backend.close()
                if not backend.num_failed:
                    break
                num_faults += 1
            else:
                pytest.fail(f"{kind} never ran out")
    assert num_faults >= 2
