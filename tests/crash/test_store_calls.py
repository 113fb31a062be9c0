"""What each call of a store does: to its checkpoints, to its slots, and to calls beside it."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest

import gds.waiting
from gds import Backend, File, MemoryBackend, StorageError, WrapperBackend
from gds.backends.wrapper import WrapperFile
from gds.contract import Capabilities, Stat
from offload.errors import (
    MismatchError,
    OffloadError,
    PinError,
    RemoteStoreError,
    StoreBusyError,
    StoreError,
    StoreFullError,
)
from offload.format.boxes import Box, Cut
from offload.format.names import MANIFEST_NAME, QUARANTINE_NAME
from offload.format.train_state import encode
from offload.retention.policy import LastK
from offload.store.opening import StoredCheckpoint
from offload.store.owners.claims import NamedParts
from offload.store.owners.store import OwnerStore
from offload.store.shared import SharedStore
from offload.store.slots.part_pool import part_bytes
from offload.store.slots.slot import Slot
from offload.store.store import Store
from offload.update.coding.recoder import BlockRecoder
from tests.crash.fault_backend import FaultBackend
from tests.crash.opened import SECOND, is_open, made
from tests.limits import HANG_S
from tests.ranks_store.job import LAYOUTS, ONE, TWO, Job
from tests.stores.files import everything, read, remove_tree, write
from tests.stores.small import STORE, make_model, make_optimizer, memory_store, train

COPY = "f" * 32


@contextmanager
def opened(
    backend: Backend, *, keep: int = 9, num_drives: int = 1, **arguments: Any
) -> Iterator[Store]:
    """Open a store on one drive or on two, and close it in the end."""
    store = Store(
        backend,
        STORE,
        [(backend, SECOND)][: num_drives - 1],
        **{"keep": LastK(keep), "train_state_bytes": 8192, "allow_volatile": True, **arguments},
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


def break_manifest(backend: Backend, step: int) -> None:
    write(backend, f"{path_of(step)}/{MANIFEST_NAME}", b"{}")


def copy_over(backend: Backend, path: str) -> None:
    """Put the same bytes at a path, in another file."""
    write(backend, path, read(backend, path))


def move_away(backend: Backend) -> dict[str, bytes | None]:
    """Put a copy of the store in its place, as another file system may hide it; return its files.

    The files that the process has open are under another name then.
    """
    backend.rename(STORE, "/away")
    backend.make_dir(STORE)
    for path, content in everything(backend, "/away").items():
        target = path.replace("/away", STORE)
        if content is None:
            backend.make_dir(target)
        else:
            write(backend, target, content)
    found: dict[str, bytes | None] = everything(backend)
    return found


def with_free_slot(backend: MemoryBackend, num_drives: int = 1) -> MemoryBackend:
    """Leave a slot in a store that nobody needs, with its part on the second drive."""
    with opened(backend, num_drives=num_drives) as store:
        store.release(acquire(store))
    return backend


def poison(store: Store, backend: FaultBackend) -> None:
    """Let a sync of the store fail."""
    backend.fail("sync_dir", 1, forever=False)
    with pytest.warns(RuntimeWarning, match="could not be marked"):
        store.quarantine(store.checkpoints[0], "damaged")


class TestOpening:
    """What the arguments of the store say."""

    def test_a_file_system_of_another_machine_has_to_be_allowed(self) -> None:
        class Remote(WrapperBackend):
            def capabilities(self, directory: str) -> Capabilities:
                return replace(super().capabilities(directory), remote=True)

        backend = Remote(MemoryBackend())
        with pytest.raises(RemoteStoreError), opened(backend):
            pass
        with opened(backend, allow_remote=True) as store:
            assert store.directories == (STORE,)

    def test_a_new_store_has_the_identity_that_it_is_given(self) -> None:
        backend = MemoryBackend()
        with opened(backend, store_id=COPY) as store:
            assert store.store_id == COPY
        with opened(memory_store(1), store_id=COPY) as store:
            assert store.store_id == newest(store).manifest.store_id != COPY

    def test_a_fresh_start_leaves_nothing_to_warn_of(self) -> None:
        backend = memory_store(2)
        break_manifest(backend, 2)
        with opened(backend) as store:
            assert [path for path, _ in store.refused] == [path_of(2)]
        with opened(backend, fresh=True) as store:
            assert store.refused == []
            assert store.newest is None

    def test_its_directories_are_named_in_order(self) -> None:
        with opened(made(1, 2), num_drives=2) as store:
            assert store.directories == (STORE, SECOND)

    def test_it_is_poisoned_once_a_sync_has_failed(self) -> None:
        backend = FaultBackend(memory_store(2))
        with opened(backend) as store:
            assert store.poisoned is False
            poison(store, backend)
            assert store.poisoned is True


class TestLosses:
    """Checkpoints that other programs have made unusable."""

    def test_one_that_is_gone_is_warned_of_as_soon_as_it_is_looked_for(self) -> None:
        backend = memory_store(2)
        with opened(backend) as store:
            remove_tree(backend, path_of(1))
            with pytest.warns(RuntimeWarning, match="was removed or moved away"):
                store.refresh()
            assert steps(store) == [2]

    def test_what_a_look_has_found_is_warned_of_later(self) -> None:
        """It is warned of even though it is in the list of the refused ones."""
        backend = memory_store(2)
        with opened(backend) as store:
            break_manifest(backend, 1)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert not store.is_usable(store.checkpoints[0])
            assert [path for path, _ in store.refused] == [path_of(1)]
            with pytest.warns(RuntimeWarning, match="not using .*step-00000001 any more"):
                store.warn_of_lost()

    def test_one_is_usable_while_its_open_files_are_its_files(self) -> None:
        backend = memory_store(2)
        with opened(backend) as store:
            checkpoint = newest(store)
            assert store.is_usable(checkpoint) is False
            store.slot_of(checkpoint)
            assert store.is_usable(checkpoint) is True
            copy_over(backend, f"{path_of(2)}/{MANIFEST_NAME}")
            assert store.is_usable(checkpoint) is False
            assert steps(store) == [1, 2]

    def test_one_that_was_found_damaged_is_not_usable(self) -> None:
        with opened(memory_store(2)) as store:
            checkpoint = newest(store)
            slot = store.slot_of(checkpoint)
            store.quarantine(checkpoint, "read twice")
            assert store.is_usable(checkpoint) is False
            assert steps(store) == [1]
            assert store.refused == [(path_of(2), "read twice")]
            assert is_open(slot)

    def test_one_that_a_rank_cannot_use_is_closed_and_nothing_is_written(self) -> None:
        backend = memory_store(2)
        with opened(backend) as store:
            checkpoint = newest(store)
            slot = store.slot_of(checkpoint)
            before = everything(backend)
            store.refuse(checkpoint, "its part is gone")
            assert steps(store) == [1]
            assert store.refused == [(path_of(2), "its part is gone")]
            assert not is_open(slot)
            assert everything(backend) == before

    def test_a_damaged_one_is_out_of_use_whatever_becomes_of_its_mark(self) -> None:
        """Not even a warning that is raised as an error brings it back."""
        backend = FaultBackend(memory_store(2))
        with opened(backend) as store:
            backend.fail_if(lambda kind, path: kind == "create" and QUARANTINE_NAME in path)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                with pytest.raises(RuntimeWarning, match="could not be marked"):
                    store.quarantine(newest(store), "read twice")
            assert steps(store) == [1]

    def test_a_slot_whose_files_cannot_be_examined_is_not_known_to_be_in_place(self) -> None:
        backend = FaultBackend(memory_store(1))
        with opened(backend) as store:
            slot = acquire(store)
            assert store.is_in_place(slot) is True
            backend.fail("stat", 1, forever=True)
            assert store.is_in_place(slot) is False
            backend.repair()
            store.release(slot)


class TestSlots:
    """Slots that are given out and given back."""

    def test_one_that_is_given_back_is_the_next_one(self) -> None:
        with opened(memory_store(1)) as store:
            slot = acquire(store)
            assert slot.path not in free_paths(store)
            store.release(slot)
            assert slot.path in free_paths(store)
            assert is_open(slot)
            assert acquire(store) is slot

    def test_one_that_has_been_sealed_meanwhile_is_not_given_back(self) -> None:
        with opened(memory_store(2)) as store:
            slot, before = store.slot_of(newest(store)), free_paths(store)
            store.release(slot)
            assert free_paths(store) == before
            assert steps(store) == [1, 2]
            assert is_open(slot)

    def test_one_that_is_damaged_is_closed_and_stays(self) -> None:
        backend = memory_store(2)
        with opened(backend) as store:
            checkpoint = newest(store)
            slot = store.slot_of(checkpoint)
            store.quarantine(checkpoint, "read twice")
            store.release(slot)
            assert not is_open(slot)
            assert slot.path not in free_paths(store)
            assert backend.stat(path_of(2)) is not None

    def test_it_is_removed_if_nothing_may_be_reused(self) -> None:
        backend = FaultBackend(memory_store(2))
        with opened(backend) as store:
            slot = acquire(store)
            poison(store, backend)
            store.release(slot)
            assert not is_open(slot)
            assert backend.stat(slot.path) is None
            assert slot.path not in free_paths(store)

    def test_an_expired_checkpoint_stays_while_another_slot_is_free(self) -> None:
        with opened(with_free_slot(memory_store(2)), keep=1) as store:
            assert len(free_paths(store)) == 1
            store.expire()
            assert steps(store) == [1, 2]
            slot = acquire(store)
            store.expire()
            assert steps(store) == [2]
            store.release(slot)

    @pytest.mark.parametrize("how", ["expire", "release"])
    def test_who_waits_for_a_slot_is_told_of_it(
        self, monkeypatch: pytest.MonkeyPatch, how: str
    ) -> None:
        """A step that begins during a seal waits for a slot, and looks again when there is one."""
        monkeypatch.setattr(gds.waiting, "_LOST_S", 3600.0)
        backend = Watched(with_free_slot(memory_store(2)))
        with opened(backend, keep=1) as store:
            slot = acquire(store)
            manifest = newest(store).manifest
            store.sealing.begin(
                replace(manifest, generation=manifest.generation + 1, step=manifest.step + 1)
            )
            found: list[Slot] = []
            waiting = threading.Thread(target=lambda: found.append(acquire(store)), daemon=True)
            backend.begin(waiting)
            assert backend.seen.wait(100)
            if how == "expire":
                store.expire()
            else:
                store.release(slot)
            waiting.join(HANG_S)
            assert not waiting.is_alive()
            assert (found[0] is slot) == (how == "release")
            store.sealing.end()

    def test_files_of_a_checkpoint_are_opened_for_reading(self) -> None:
        with opened(memory_store(1)) as store:
            assert not store.slot_of(newest(store)).writable

    def test_closing_closes_everything(self) -> None:
        """Free slots, checkpoints, damaged ones, and old files that a step may still read."""
        backend = memory_store(5)
        with opened(backend) as store:
            free = acquire(store)
            store.release(free)
            slots = {c.manifest.step: store.slot_of(c) for c in store.checkpoints}
            store.quarantine(store.find(4), "read twice")
            remove_tree(backend, path_of(5))
            with pytest.warns(RuntimeWarning, match="was removed"):
                store.refresh()
            assert steps(store) == [1, 2, 3]
            every = [free, *slots.values()]
            assert [is_open(slot) for slot in every] == [True] * 6
            store.close()
            assert [is_open(slot) for slot in every] == [False] * 6
            store.close()
        with opened(backend):
            pass


class TestReplacing:
    """Small files of a checkpoint that are replaced."""

    def test_a_manifest_that_could_not_be_replaced_is_the_one_of_before(self) -> None:
        backend = FaultBackend(memory_store(1))
        with opened(backend) as store:
            checkpoint = newest(store)
            before = checkpoint.manifest
            after = replace(before, metrics={"loss": 1.0})
            backend.fail("create", 1, forever=False)
            with pytest.raises(StorageError, match="No space left"):
                store.replace_manifest(checkpoint, after)
            assert checkpoint.manifest is before
            store.replace_manifest(checkpoint, after)
            assert checkpoint.manifest is after
        with opened(backend) as store:
            assert newest(store).manifest.metrics == {"loss": 1.0}

    def test_nothing_is_written_into_another_store(self) -> None:
        backend = memory_store(1)
        with opened(backend) as store:
            checkpoint = newest(store)
            store.slot_of(checkpoint)
            before = move_away(backend)
            with pytest.raises(StoreError, match="not the directory that was opened"):
                store.replace_train_state(checkpoint, encode({"step": 7}))
            assert everything(backend) == before

    def test_a_file_that_came_too_late_is_closed(self) -> None:
        """The directory is moved while the new file is written."""
        backend = Watched(memory_store(1))
        with opened(backend) as store:
            checkpoint = newest(store)
            store.slot_of(checkpoint)
            before = dict(backend.num_open)
            backend.after_create = lambda: move_away(backend)
            with pytest.raises(StoreError, match="not the directory that was opened"):
                store.replace_train_state(checkpoint, encode({"step": 7}))
            assert backend.num_open == before
            assert read(backend, f"{path_of(1)}/{MANIFEST_NAME}")


class TestWithdrawal:
    """A restore that goes back to an older checkpoint, and the removal of what nobody needs."""

    def test_one_that_is_being_read_ends_it(self) -> None:
        """Those that are newer than that one are withdrawn already."""
        backend = memory_store(4)
        with opened(backend) as store:
            reader = backend.lock(path_of(3), shared=True)
            with pytest.raises(StoreBusyError, match="close its readers") as caught:
                store.withdraw_newer(store.find(1))
            assert caught.value.filename == path_of(3)
            assert steps(store) == [1, 2, 3]
            reader.release()
            store.withdraw_newer(store.find(1))
            assert steps(store) == [1]

    def test_no_more_slots_stay_than_retention_needs(self) -> None:
        with opened(memory_store(4), keep=1) as store:
            store.withdraw_newer(store.find(1))
            assert steps(store) == [1]
            assert len(free_paths(store)) == 1

    def test_a_slot_that_cannot_be_removed_is_no_error(self) -> None:
        backend = FaultBackend(memory_store(4))
        with opened(backend, keep=1) as store:
            backend.fail("remove", 1, forever=True)
            store.withdraw_newer(store.find(1))
            assert steps(store) == [1]
            backend.repair()

    def test_a_pinned_one_keeps_all_that_are_newer(self) -> None:
        with opened(memory_store(4)) as store:
            store.keeping.pin("best", 2)
            with pytest.raises(PinError, match="'best'"):
                store.withdraw_newer(store.find(1))
            assert steps(store) == [1, 2, 3, 4]

    def test_nothing_is_withdrawn_after_a_failed_sync(self) -> None:
        backend = FaultBackend(memory_store(3))
        with opened(backend) as store:
            poison(store, backend)
            with pytest.raises(StoreError, match="cannot be withdrawn any more") as caught:
                store.withdraw_newer(store.find(2))
            assert not isinstance(caught.value, StoreBusyError)
            assert steps(store) == [2, 3]

    @pytest.mark.parametrize(
        "call",
        [
            lambda store: store.prune(),
            lambda store: store.quarantine(newest(store), "read twice"),
        ],
        ids=["prune", "quarantine"],
    )
    def test_nothing_is_changed_in_another_store(self, call: Callable[[Store], None]) -> None:
        backend = memory_store(2)
        with opened(backend) as store:
            before = move_away(backend)
            with pytest.raises(StoreError, match="not the directory that was opened"):
                call(store)
            assert everything(backend) == before
            assert steps(store) == [1, 2]

    def test_the_removal_of_a_slot_is_durable(self) -> None:
        backend = FaultBackend(with_free_slot(memory_store(1)))
        with opened(backend) as store:
            assert len(free_paths(store)) == 1
            backend.fail_if(lambda kind, path: (kind, path) == ("sync_dir", STORE))
            with pytest.raises(StorageError, match="injected"):
                store.prune()
            store.prune()
            assert free_paths(store) == []


def half_withdrawn() -> tuple[MemoryBackend, str, str]:
    """Return a store on two drives, whose first checkpoint has lost its name and nothing else.

    A process has died in the middle of a withdrawal: the slot has its manifest, and the part is as
    it was sealed. The paths of both are returned as well.
    """
    backend = with_free_slot(made(2, 2), 2)
    with opened(backend, num_drives=2) as store:
        (part,) = store.find(1).manifest.parts
    slot = f"{STORE}/.slot-9"
    backend.rename(path_of(1), slot)
    return backend, slot, f"{SECOND}/{part.name}"


class TestParts:
    """Parts on further drives, and those of owners."""

    def test_the_part_of_a_slot_that_was_half_withdrawn_belongs_to_no_checkpoint(self) -> None:
        backend, slot, part = half_withdrawn()
        with opened(backend, num_drives=2) as store:
            slots, parts = store.leftovers()
            assert slot in slots
            assert (backend, part) in parts.removable

    def test_it_is_removed_by_a_prune(self) -> None:
        backend, slot, part = half_withdrawn()
        with opened(backend, num_drives=2) as store:
            store.prune()
            assert steps(store) == [2]
        assert backend.stat(slot) is None
        assert backend.stat(part) is None

    def test_a_slot_stays_until_its_part_is_gone(self) -> None:
        """Only its manifest tells a later process that nobody needs the part."""
        inner, slot, part = half_withdrawn()
        backend = FaultBackend(inner)
        with opened(backend, num_drives=2) as store:
            backend.fail_if(lambda kind, path: kind == "remove" and path.startswith(part))
            with pytest.raises(StorageError, match="injected"):
                store.prune()
        assert backend.stat(slot) is not None
        with opened(backend, num_drives=2) as store:
            store.prune()
        assert backend.stat(slot) is None
        assert backend.stat(part) is None

    def test_ranks_remove_what_one_process_had_on_further_drives(self) -> None:
        backend, _, part = half_withdrawn()
        unsealed = f"{SECOND}/part-3"
        assert backend.stat(unsealed) is not None
        shared = SharedStore({1: STORE}, {})
        with opened(backend, num_drives=2, shared=shared) as store:
            (kept,) = newest(store).manifest.parts
            store.release(store.acquire(LAYOUTS[0], 1))
            assert steps(store) == [2]
        assert backend.stat(part) is None
        assert backend.stat(unsealed) is None
        assert backend.stat(f"{SECOND}/{kept.name}") is not None

    def test_one_process_writes_its_free_part_again(self) -> None:
        backend = with_free_slot(made(1, 2), 2)
        path = f"{SECOND}/part-2/part.json"
        before = backend.stat(path)
        assert before is not None
        with opened(backend, num_drives=2) as store:
            store.release(acquire(store))
        after = backend.stat(path)
        assert after is not None
        assert after.inode == before.inode

    def test_one_process_removes_what_ranks_have_left_on_any_drive(self) -> None:
        backend = made(1, 2)
        with opened(backend, num_drives=2) as store:
            paths = [
                left_by_owner(backend, STORE, 1, store.store_id),
                left_by_owner(backend, SECOND, 2, store.store_id),
            ]
            store.release(acquire(store))
            assert [backend.stat(path) for path in paths] == [None, None]

    def test_ranks_keep_what_ranks_write(self) -> None:
        backend = MemoryBackend()
        with opened(backend, shared=SharedStore({1: STORE}, {})) as store:
            path = left_by_owner(backend, STORE, 1, store.store_id)
            store.release(store.acquire(LAYOUTS[0], 1))
            assert backend.stat(path) is not None

    def test_a_store_with_a_history_takes_over_no_other_one(self) -> None:
        backend = memory_store(1)
        with opened(backend) as store:
            own = store.store_id
            with pytest.raises(StoreError, match="has checkpoints"):
                store.take_over(COPY, 5)
            assert store.store_id == own
        break_manifest(backend, 1)
        with opened(backend) as store:
            assert (store.checkpoints, len(store.refused)) == ([], 1)
            with pytest.raises(StoreError, match="has checkpoints"):
                store.take_over(COPY, 5)
            assert store.store_id != COPY

    def test_parts_of_the_history_that_is_taken_over_are_the_stores_own(self) -> None:
        backend, source = MemoryBackend(directories=[STORE, SECOND]), made(1, 2)
        with opened(source, num_drives=2) as store:
            theirs = store.store_id
            (part,) = newest(store).manifest.parts
        path = f"{SECOND}/{part.name}"
        with opened(backend, num_drives=2) as store:
            backend.make_dir(path)
            for name in source.list_dir(path):
                write(backend, f"{path}/{name}", read(source, f"{path}/{name}"))
            assert store.leftovers()[1].unnamed == []
            store.take_over(theirs, 5)
            assert store.store_id == theirs
            assert store.leftovers()[1].unnamed == [path]


def left_by_owner(backend: Backend, directory: str, owner: int, store_id: str) -> str:
    """Return the path of a part that an owner has begun to write; the owner has ended."""
    one = OwnerStore(backend, directory, owner, store_id=store_id, allow_volatile=True)
    slot = one.ready(LAYOUTS[1], 1, NamedParts({}), written=())
    one.close()
    assert backend.stat(slot.path) is not None
    return slot.path


class TestAnotherCut:
    """Checkpoints that are read in another cut than they were made in."""

    def test_only_a_whole_checkpoint_of_one_process_fits_it(self) -> None:
        backend = MemoryBackend()
        with Job([backend, backend], directories=(ONE, ONE)) as job:
            checkpoint = job.seal(1)
            assert job.store.fits(checkpoint, None) is False
        with opened(memory_store(1)) as store:
            assert store.fits(newest(store), None) is True
            assert store.fits(newest(store), {}) is False

    def test_it_is_read_from_the_drives_for_the_drives(self) -> None:
        with opened(made(1, 2), num_drives=2) as store:
            for shares in ((1,), (1, 2)):
                source = store.recut(newest(store), None, shares=shares)
                assert source.layout.shares == shares
                source.close()

    def test_blocks_that_the_cut_divides_are_encoded_anew_if_asked_for(self) -> None:
        backend = MemoryBackend()
        with make_optimizer(make_model(), backend, settings={"state_dtype": "int8"}) as optimizer:
            train(optimizer, 1)
        with opened(backend) as store:
            cuts = {"0.weight": Cut((40, 30), Box((0, 0), (40, 15)))}
            with pytest.raises(MismatchError, match=r"'0\.weight'"):
                store.recut(newest(store), cuts)
            source = store.recut(newest(store), cuts, recode=BlockRecoder())
            assert source.reencoded == {"0.weight"}
            source.close()

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
            lasting = job.store.lasting_parts()
            assert lasting == NamedParts({1: frozenset([reference.name])})
            assert job.store.named_parts().of(1) > {reference.name}
            kept = (last.path, f"{ONE}/owner-1/{reference.name}")
            spare = {
                path: len(content)
                for path, content in everything(backend, ONE).items()
                if content is not None and not path.startswith(kept)
                if any(name in path for name in ("/.slot-", "/step-", "/part-"))
            }
            assert any("/.slot-" in path for path in spare)
            assert job.store.available_bytes() == backend.free_bytes(ONE) + sum(spare.values())

    def test_each_drive_needs_room_for_its_part_of_the_first_slot(self) -> None:
        backend = Spacious(MemoryBackend())
        layout = replace(LAYOUTS[0], shares=(1, 1))
        store = Store(
            backend,
            ONE,
            [(backend, TWO)],
            keep=LastK(1),
            train_state_bytes=8192,
            allow_volatile=True,
        )
        slot = store.acquire(layout, 1)
        backend.free = needed = store.slot_bytes(layout, 1) + part_bytes(layout, 1)
        store.release(slot)
        store.prune()
        store.require_recut_room(layout, 1)
        backend.free = needed - 1
        with pytest.raises(StoreFullError, match="Nothing has been changed"):
            store.require_recut_room(layout, 1)
        store.release(store.acquire(layout, 1))
        backend.free = 0
        store.require_recut_room(layout, 1)  # the free slot and its part are enough
        store.close()


class Spacious(WrapperBackend):
    """A backend on one drive, with as much room as a test says."""

    free = 1 << 40

    def free_bytes(self, directory: str) -> int:
        """Return what the test says."""
        assert super().free_bytes(directory)
        return self.free


class Watched(WrapperBackend):
    """A backend that sees which thread does what, and which files are open."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self._thread: threading.Thread | None = None
        self.seen = threading.Event()
        """Set when the thread that `begin` has started looks at anything."""
        self.held, self.go_on = threading.Event(), threading.Event()
        self._holder: threading.Thread | None = None
        self.num_open: dict[str, int] = {}
        """Number of open files, by name."""
        self.after_create: Callable[[], object] | None = None

    def begin(self, thread: threading.Thread) -> None:
        """Start a thread that is watched."""
        self._thread = thread
        thread.start()

    def hold(self, thread: threading.Thread) -> None:
        """Start a thread, and return when it creates a file, which lasts until `go_on` is set."""
        self._holder = thread
        thread.start()
        assert self.held.wait(100)

    def wrap_file(self, file: File) -> File:
        """Count the file as open."""
        return _WatchedFile(file, self)

    def create(self, path: str, size_bytes: int) -> File:
        """Create, and say so."""
        self._look()
        if threading.current_thread() is self._holder:
            self.held.set()
            assert self.go_on.wait(100)
        file = super().create(path, size_bytes)
        after, self.after_create = self.after_create, None
        if after is not None:
            after()
        return file

    def stat(self, path: str) -> Stat | None:
        """Look, and say so."""
        self._look()
        return super().stat(path)

    def list_dir(self, path: str) -> list[str]:
        """List, and say so."""
        self._look()
        return super().list_dir(path)

    def _look(self) -> None:
        if threading.current_thread() is self._thread:
            self.seen.set()


class _WatchedFile(WrapperFile):
    """A file that says when it is closed."""

    def __init__(self, inner: File, backend: Watched) -> None:
        super().__init__(inner)
        self._name = inner.path
        self._num_open = backend.num_open
        self._is_open = True
        self._num_open[self._name] = self._num_open.get(self._name, 0) + 1

    def close(self) -> None:
        """Close, and say so."""
        super().close()
        if self._is_open:
            self._is_open = False
            self._num_open[self._name] -= 1
            if not self._num_open[self._name]:
                del self._num_open[self._name]


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
    with opened(backend, num_drives=2, shared=SharedStore({1: STORE}, {})) as store:
        slot = store.acquire(LAYOUTS[0], 1)

        def call() -> None:
            with suppress(OffloadError):
                CALLS[name](store, slot)

        pinning = threading.Thread(target=store.keeping.pin, args=("best",))
        calling = threading.Thread(target=call)
        backend.hold(pinning)
        backend.begin(calling)
        calling.join(0.2)
        did_nothing = calling.is_alive() and not backend.seen.is_set()
        backend.go_on.set()
        pinning.join()
        calling.join()
        assert did_nothing
