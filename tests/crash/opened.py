"""A small store that is open for writing, without a process that trains in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from gds import Backend, MemoryBackend, StorageError
from offload import DriveTuning, LastK, Retention
from offload.store import Slot, Store, StoredCheckpoint
from tests.crash.fault_backend import FaultBackend
from tests.stores import small
from tests.stores.small import STORE, memory_store

SECOND = "/second/run"
"""Directory of the store on its second drive, if it has one."""


def made(num_checkpoints: int, num_drives: int = 1) -> MemoryBackend:
    """Return files with checkpoints of steps 1, 2, ..., made by a process that has ended."""
    if num_drives == 1:
        return memory_store(num_checkpoints)
    tuning = DriveTuning(shares=(1, 1), calibrate=False)
    backend = MemoryBackend()
    with small.make_optimizer(
        small.make_model(),
        backend,
        settings={"drives": tuning},
        directory=[STORE, SECOND],
        keep=num_checkpoints,
    ) as optimizer:
        small.train(optimizer, num_checkpoints)
    return backend.reopened()


@contextmanager
def opened(
    backend: Backend, keep: int | Retention = 9, num_drives: int = 1, **arguments: Any
) -> Iterator[Store]:
    """Open a store on one drive or on two, which waits for no reader, and close it in the end."""
    store = Store(
        backend,
        STORE,
        [(backend, SECOND)][: num_drives - 1],
        **{
            "keep": LastK(keep) if isinstance(keep, int) else keep,
            "train_state_bytes": 8192,
            "allow_volatile": True,
            "reader_timeout_s": 0.0,
            **arguments,
        },
    )
    try:
        yield store
    finally:
        store.close()


def path_of(step: int) -> str:
    return f"{STORE}/step-{step:08d}"


def steps(store: Store) -> list[int]:
    return [checkpoint.manifest.step for checkpoint in store.checkpoints]


def newest(store: Store) -> StoredCheckpoint:
    found = store.newest
    assert found is not None
    return found


def acquire(store: Store) -> Slot:
    """Acquire a slot like that of the newest checkpoint."""
    manifest = newest(store).manifest
    return store.acquire(manifest.layout, len(manifest.groups))


def free_paths(store: Store) -> list[str]:
    return store.leftovers()[0]


def with_free_slot(backend: MemoryBackend, num_drives: int = 1) -> MemoryBackend:
    """Leave a slot in a store that nobody needs, with its part on the second drive."""
    with opened(backend, num_drives=num_drives) as store:
        store.release(acquire(store))
    return backend


def poison(store: Store, backend: FaultBackend) -> None:
    """Let a sync of the store fail, as it marks its oldest checkpoint."""
    backend.fail("sync_dir", 1, forever=False)
    with pytest.warns(RuntimeWarning, match="could not be marked"):
        store.quarantine(store.checkpoints[0], "damaged")
    assert store.poisoned


def is_open(slot: Slot) -> bool:
    """Return whether the files of a slot can be read."""
    try:
        slot.manifest.read_bytes(0, 1)
    except StorageError:
        return False
    return True
