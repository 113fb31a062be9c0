"""A small store that is open for writing, as its parts: what keeps, withdraws and looks at it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gds import Backend, MemoryBackend, StorageError
from gds.waiting import Monitor
from offload import DriveTuning
from offload.journal import Journal
from offload.retention.policy import LastK, Retention
from offload.store.census import Census
from offload.store.expiry import Keeping
from offload.store.opening import StoredCheckpoint, open_directories, open_stored
from offload.store.poison import Poison
from offload.store.slots.free import FreeSlots
from offload.store.slots.slot import Slot
from offload.store.withdrawal import Withdrawal
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


class Opened:
    """The parts of a store that decide which checkpoints stay, each made as the store makes it."""

    def __init__(self, backend: Backend, keep: int | Retention, num_drives: int = 1) -> None:
        self.backend = backend
        self.poison = Poison(STORE)
        drives = [(backend, directory) for directory in [STORE, SECOND][:num_drives]]
        self.content = open_directories(drives, self.poison, allow_volatile=True)
        self.checkpoints = self.content.checkpoints
        self.parts = self.content.parts
        self.changed = Monitor()
        self.census = Census(backend, self.content)
        policy = LastK(keep) if isinstance(keep, int) else keep
        self.keeping = Keeping(
            backend, STORE, policy, self.content, self.changed, self.poison, self.census
        )
        self.free = FreeSlots(backend, STORE, self.content.leftover, self.parts, self.poison)
        self.journal = Journal()
        self.withdrawal = Withdrawal(
            self.content, self.keeping, self.census, self.free, self.poison, self.journal
        )

    @property
    def steps(self) -> list[int]:
        """Steps of the checkpoints in the list."""
        return [checkpoint.manifest.step for checkpoint in self.checkpoints]

    @property
    def on_drive(self) -> list[str]:
        """Names of the checkpoints and slots in the first directory."""
        names = self.backend.list_dir(STORE)
        return sorted(name for name in names if name.startswith(("step-", ".slot-")))

    def step(self, number: int) -> StoredCheckpoint:
        """Return the checkpoint of a step."""
        (found,) = [one for one in self.checkpoints if one.manifest.step == number]
        return found

    def open(self, number: int, *, writable: bool = False) -> Slot:
        """Open the files of the checkpoint of a step, which this process keeps open."""
        return open_stored(self.backend, self.step(number), self.parts, writable=writable)


@contextmanager
def opened(backend: Backend, keep: int | Retention, num_drives: int = 1) -> Iterator[Opened]:
    """Open the store for writing, and let go of its locks in the end."""
    store = Opened(backend, keep, num_drives)
    try:
        yield store
    finally:
        store.free.close()
        store.census.close()
        for checkpoint in store.checkpoints:
            checkpoint.close()
        store.content.lock.release()


def is_open(slot: Slot) -> bool:
    """Return whether the files of a slot can be read."""
    try:
        slot.manifest.read_bytes(0, 1)
    except StorageError:
        return False
    return True
