"""What each call of a store does: to its checkpoints, to its slots, and to calls beside it."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from contextlib import suppress

import pytest

import offload
from gds import Backend, File, MemoryBackend, StorageError, WrapperBackend
from gds.contract import Stat
from offload.errors import (
    OffloadError,
)
from offload.store import Slot, Store
from offload.store.shared import SharedStore
from tests.crash.crash_backend import CrashBackend
from tests.crash.fault_backend import FaultBackend
from tests.crash.opened import (
    SECOND,
    acquire,
    free_paths,
    is_open,
    made,
    newest,
    opened,
    path_of,
    steps,
    with_free_slot,
)
from tests.ranks_store.job import LAYOUTS, ONE, TWO, Job
from tests.stores.files import everything, read, write
from tests.stores.small import STORE, make_model, make_optimizer, train

COPY, OTHER_COPY = "f" * 32, "e" * 32


def of_ranks(*directories: str) -> SharedStore:
    """Return what the first of several ranks is told of the directories of the others."""
    return SharedStore(dict(enumerate(directories, 1)), {})


class TestOpening:
    def test_names_are_durable_before_they_are_used(self) -> None:
        """The process that made them may have been killed before it could sync them."""
        backend = CrashBackend()
        with make_optimizer(make_model(), backend, keep=2) as optimizer:
            train(optimizer, 2)
        before = len(backend.log)
        with opened(backend):
            synced = [str(operation) for operation in backend.log[before:]]
        assert synced == [f"sync_dir {path}" for path in ("/", STORE, path_of(1), path_of(2))]


class TestLosses:
    """Checkpoints that other programs have made unusable."""

    @pytest.mark.parametrize("is_damaged", [True, False], ids=["damaged", "refused by a rank"])
    def test_one_that_cannot_be_used_counts_no_more(self, is_damaged: bool) -> None:
        """Of a damaged one a step may still read what it has not read yet."""
        backend = made(2)
        with opened(backend) as store:
            checkpoint = newest(store)
            slot, before = store.slot_of(checkpoint), everything(backend)
            (store.quarantine if is_damaged else store.refuse)(checkpoint, "read twice")
            assert store.is_usable(checkpoint) is False
            assert (steps(store), store.refused) == ([1], [(path_of(2), "read twice")])
            assert is_open(slot) == is_damaged
            assert (everything(backend) == before) == (not is_damaged)
            if is_damaged:
                store.release(slot)
                assert not is_open(slot)
                assert slot.path not in free_paths(store)
                assert b"read twice" in read(backend, f"{path_of(2)}/damaged.txt")

    def test_a_damaged_one_is_out_of_use_whatever_becomes_of_its_mark(self) -> None:
        """Not even a warning that is raised as an error brings it back."""
        backend = FaultBackend(made(2))
        with opened(backend) as store:
            backend.fail_if(lambda kind, path: kind == "create" and "damaged.txt" in path)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                with pytest.raises(RuntimeWarning, match="could not be marked"):
                    store.quarantine(newest(store), "read twice")
            assert steps(store) == [1]


class TestSlots:
    def test_one_that_is_given_back_is_the_next_one_and_lent_once(self) -> None:
        with opened(made(1)) as store:
            slot = acquire(store)
            assert slot.path not in free_paths(store)
            for _ in range(2):
                store.release(slot)
            assert slot.path in free_paths(store)
            assert is_open(slot)
            assert acquire(store) is slot
            assert acquire(store) is not slot

    def test_one_of_several_ranks_is_locked_and_one_of_one_process_is_not(self) -> None:
        backend = FaultBackend(MemoryBackend())
        with opened(backend, shared=of_ranks(STORE)) as store:
            backend.fail_if(lambda kind, path: kind == "lock" and "/.slot-" in path)
            with pytest.raises(StorageError, match="injected failure of lock"):
                store.acquire(LAYOUTS[0], 1)
            slot = store.acquire(LAYOUTS[0], 1)
            backend.lock(slot.path, shared=True).release()
            with pytest.raises(StorageError, match="held"):
                backend.lock(slot.path)
        with opened(backend) as store:
            backend.lock(store.acquire(LAYOUTS[0], 1).path).release()
        backend.close()


class TestPartsOfOthers:
    """What one process and several ranks have left of each other in one store."""

    def test_ranks_remove_what_one_process_had_on_further_drives(self) -> None:
        """Also of a withdrawal that was cut short: the slot still has its manifest."""
        backend = with_free_slot(made(2, 2), 2)
        with opened(backend, num_drives=2) as store:
            (old,), (kept,) = (store.find(step).manifest.parts for step in (1, 2))
        backend.rename(path_of(1), f"{STORE}/.slot-9")
        with opened(backend, num_drives=2, shared=of_ranks(STORE)) as store:
            store.acquire(LAYOUTS[0], 1)
            assert steps(store) == [2]
        assert old.name != kept.name
        assert [n for n in backend.list_dir(SECOND) if n.startswith("part-")] == [kept.name]

    @pytest.mark.parametrize("ranks", [True, False], ids=["kept by ranks", "removed by one"])
    def test_what_ranks_have_begun_to_write(self, ranks: bool) -> None:
        backend = MemoryBackend()
        with Job([backend, backend], directories=(ONE, ONE)) as job:
            _, part = job.grant()
        store = Store(
            backend, ONE, keep=offload.LastK(1), train_state_bytes=8192, allow_volatile=True,
            shared=of_ranks(ONE) if ranks else None,
        )  # fmt: skip
        store.acquire(LAYOUTS[0], 1)
        assert (backend.stat(part.path) is not None) == ranks
        store.close()

    @pytest.mark.parametrize("is_last", [False, True], ids=["named before", "named after"])
    def test_an_old_copy_of_a_part_does_not_hide_that_of_the_newest_checkpoint(
        self, is_last: bool
    ) -> None:
        """The parts have the same names in both directories, and one process opens all of them."""
        backend, copy = MemoryBackend(directories=["/copy/run/owner-1"]), "/copy/run"
        with Job([backend, backend]) as job:
            job.seal(1)
        for path, data in everything(backend, f"{TWO}/owner-1").items():
            target = path.replace(TWO, copy)
            backend.make_dir(target) if data is None else write(backend, target, data)
        with Job([backend, backend]) as job:
            job.seal(2)
            job.seal(3)
        assert {*backend.list_dir(f"{copy}/owner-1")} & {*backend.list_dir(f"{TWO}/owner-1")}
        further = [(backend, path) for path in ([TWO, copy] if is_last else [copy, TWO])]
        keep = offload.LastK(9)
        store = Store(backend, ONE, further, keep=keep, train_state_bytes=8192, allow_volatile=True)
        assert steps(store)[-1] == 3
        store.close()


class TestAnotherCut:
    """Checkpoints that are read in another cut than they were made in."""

    def test_what_expires_is_room_for_it(self) -> None:
        """Everything of the store is, but the newest checkpoint with its part."""
        backend = MemoryBackend(capacity_bytes=1 << 30)
        with Job([backend, backend], directories=(ONE, ONE), keep=3) as job:
            for step in (1, 2, 3):
                job.seal(step)
            job.store.release(job.store.acquire(job.layouts[0], 1))
        with Job([backend, backend], directories=(ONE, ONE), keep=1) as job:
            last = newest(job.store)
            (reference,) = last.manifest.owners
            assert job.store.lasting_parts().of(1) == {reference.name}
            assert job.store.named_parts().of(1) > {reference.name}
            kept = (last.path, f"{ONE}/owner-1/{reference.name}")
            spare = sum(
                len(content)
                for path, content in everything(backend, ONE).items()
                if content is not None and not path.startswith(kept)
                if any(name in path for name in ("/.slot-", "/step-", "/part-"))
            )
            assert spare
            assert job.store.available_bytes() == backend.free_bytes(ONE) + spare


class Watched(WrapperBackend):
    """Holds one thread as it creates a file, and sees whether another one looks at anything."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.holder: threading.Thread | None = None
        self.watched: threading.Thread | None = None
        self.seen, self.held, self.go_on = (threading.Event() for _ in range(3))

    def create(self, path: str, size_bytes: int) -> File:
        self._look()
        if threading.current_thread() is self.holder:
            self.held.set()
            assert self.go_on.wait(100)
        return super().create(path, size_bytes)

    def stat(self, path: str) -> Stat | None:
        self._look()
        return super().stat(path)

    def list_dir(self, path: str) -> list[str]:
        self._look()
        return super().list_dir(path)

    def _look(self) -> None:
        if threading.current_thread() is self.watched:
            self.seen.set()


CALLS: dict[str, Callable[[Store, Slot], object]] = {
    "refresh": lambda store, _: store.refresh(),
    "is_usable": lambda store, _: store.is_usable(newest(store)),
    "take_over": lambda store, _: store.take_over(COPY, 5),
    "acquire": lambda store, _: store.acquire(LAYOUTS[0], 1),
    "lasting_parts": lambda store, _: store.lasting_parts(),
    "available_bytes": lambda store, _: store.available_bytes(),
    "release": lambda store, slot: store.release(slot),
    "expire": lambda store, _: store.expire(),
    "named_parts": lambda store, _: store.named_parts(),
    "leftovers": lambda store, _: store.leftovers(),
    "prune": lambda store, _: store.prune(),
    "quarantine": lambda store, _: store.quarantine(newest(store), "read twice"),
    "refuse": lambda store, _: store.refuse(newest(store), "its part is gone"),
    "withdraw_newer": lambda store, _: store.withdraw_newer(newest(store)),
    "close": lambda store, _: store.close(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_waits_for_the_one_before_it_and_looks_at_nothing(name: str) -> None:
    """A pin is being made, for which no other thread may change the list of checkpoints."""
    backend = Watched(made(2, 2))
    with opened(backend, num_drives=2, shared=of_ranks(STORE)) as store:
        slot = store.acquire(LAYOUTS[0], 1)

        def call() -> None:
            with suppress(OffloadError):
                CALLS[name](store, slot)

        backend.holder = threading.Thread(target=store.keeping.pin, args=("best",))
        backend.watched = threading.Thread(target=call)
        backend.holder.start()
        assert backend.held.wait(100)
        backend.watched.start()
        backend.watched.join(0.05)
        did_nothing = backend.watched.is_alive() and not backend.seen.is_set()
        backend.go_on.set()
        backend.holder.join()
        backend.watched.join()
        assert did_nothing
