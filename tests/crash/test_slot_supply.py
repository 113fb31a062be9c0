"""Which slot a store gives out next, what it gives up for it, and what an error leaves behind."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import pytest

from gds import Backend, MemoryBackend, StorageError
from gds.contract import File
from offload.errors import StoreError, StoreFullError
from offload.format.layout import Layout, ModelTensor, ParameterSpec
from offload.format.names import LOCK_NAME, STORE_FILE_NAME
from offload.format.train_state import encode
from offload.retention.policy import LastK
from offload.store.opening import StoredCheckpoint
from offload.store.sealing import Prepared, compose
from offload.store.shared import SharedStore
from offload.store.slots.slot import Slot
from offload.store.store import Store
from tests.crash.crash_backend import CrashBackend
from tests.crash.fault_backend import FaultBackend
from tests.crash.test_slot_files import is_open
from tests.ranks_store.job import ARRAYS, Job, write_state
from tests.stores.files import everything, write

ONE, TWO, THREE = "/one/run", "/two/run", "/three/run"
COPY, OTHER_COPY = "f" * 32, "e" * 32


def layout_of(rows: int = 90, *, drives: int = 1) -> Layout:
    """Return a layout of one parameter, whose state is in several chunks."""
    shape = (rows, 60)
    return Layout(
        (ParameterSpec("weight", "BF16", shape, 0, ARRAYS),),
        (ModelTensor("weight", "BF16", shape),),
        1024,
        shares=(1,) * drives,
    )


class _Room(FaultBackend):
    """Has as much room in each directory as the test says, and fails when it is told to."""

    def __init__(self, inner: Backend | None = None) -> None:
        super().__init__(inner or MemoryBackend())
        self.free: dict[str, int] = {}
        self._made: list[File] = []

    def wrap_file(self, file: File) -> File:
        self._made.append(file)
        return super().wrap_file(file)

    @property
    def open_in_slots(self) -> list[str]:
        """Paths of the files of slots and their parts that are open."""
        inside = [file for file in self._made if "/.slot-" in file.path or "/part-" in file.path]
        return [file.path for file in inside if is_open(file)]

    def free_bytes(self, directory: str) -> int:
        return self.free.get(directory, super().free_bytes(directory))

    def create(self, path: str, size_bytes: int) -> File:
        """Make a file, whose size the directory loses."""
        for directory in self.free:
            if path.startswith(f"{directory}/"):
                if self.free[directory] < size_bytes:
                    raise StorageError(errno.ENOSPC, "create", path)
                self.free[directory] -= size_bytes
        return super().create(path, size_bytes)

    def remove(self, path: str) -> None:
        """Remove a file, whose size the directory gets back."""
        stat = self.stat(path)
        super().remove(path)
        for directory in self.free:
            if path.startswith(f"{directory}/") and stat is not None:
                self.free[directory] += stat.size_bytes


def opened(backend: Backend, *others: str, **changes: object) -> Store:
    """Open a store that keeps one checkpoint and waits for no reader, unless changed."""
    settings: dict[str, Any] = {"keep": LastK(1), "reader_timeout_s": 0.0, **changes}
    return Store(
        backend,
        ONE,
        [(backend, other) for other in others],
        train_state_bytes=8192,
        allow_volatile=True,
        **settings,
    )


def prepared(store: Store, slot: Slot, step: int) -> Prepared:
    """Write a step into a slot, and seal it up to the rename; the seal is announced."""
    write_state(slot, 0, step)
    composition = compose(
        slot,
        encode({"step": step}),
        step=step,
        torch_version="2.13.0",
        optimizer="torch.optim.adamw.AdamW",
        groups=[{"lr": 0.1}],
        scalars=((("step", "f32", 1.0),),),
        order=None,
    )
    store.sealing.begin(composition.manifest)
    return store.sealing.prepare(slot, composition, composition.manifest.model_digests)


def seal(store: Store, slot: Slot, step: int) -> StoredCheckpoint:
    """Write a step into a slot, and make it a checkpoint."""
    checkpoint = store.sealing.publish(prepared(store, slot, step))
    store.sealing.end()
    return checkpoint


@contextmanager
def reading(backend: Backend, path: str) -> Iterator[None]:
    """Hold a checkpoint as a reader does."""
    lock = backend.lock(path, shared=True)
    yield
    lock.release()


def generation_of(checkpoint: StoredCheckpoint) -> int:
    return checkpoint.manifest.generation


def slots_in(backend: Backend) -> list[str]:
    return [name for name in backend.list_dir(ONE) if name.startswith((".slot-", "step-"))]


def steps_of(store: Store) -> list[int]:
    return [checkpoint.manifest.step for checkpoint in store.checkpoints]


@pytest.fixture
def backend() -> _Room:
    return _Room()


class TestLeaving:
    """An expired checkpoint is on its way to a tier when the next step needs a slot."""

    @staticmethod
    def leaving(backend: _Room, layout: Layout) -> Store:
        """Return a store with an expired checkpoint that is being sent, and a newer one."""
        store = opened(backend)
        first = seal(store, store.acquire(layout, 1), 1)
        store.keeping.leaving.begin(generation_of(first), "sending")
        seal(store, store.acquire(layout, 1), 2)
        assert steps_of(store) == [1, 2]
        return store

    def test_it_stays_as_long_as_there_is_room_for_one_slot_more(self, backend: _Room) -> None:
        with closing(self.leaving(backend, layout_of())) as store:
            slot = store.acquire(layout_of(), 1)
            assert steps_of(store) == [1, 2]
            assert store.keeping.leaving.has_room is True
            assert len(slots_in(backend)) == 3
            seal(store, slot, 3)
            assert steps_of(store) == [1, 3]

    def test_it_gives_way_when_there_is_no_room(self, backend: _Room) -> None:
        with closing(self.leaving(backend, layout_of())) as store:
            backend.free[ONE] = 0
            slot = store.acquire(layout_of(), 1)
            assert steps_of(store) == [2]
            assert store.keeping.leaving.has_room is False
            seal(store, slot, 3)
            assert steps_of(store) == [3]

    def test_one_that_is_not_leaving_gives_way_before_it(self, backend: _Room) -> None:
        with closing(self.leaving(backend, layout_of())) as store:
            slot = store.acquire(layout_of(), 1)
            with reading(backend, f"{ONE}/step-00000002"):
                seal(store, slot, 3)
            assert steps_of(store) == [1, 2, 3]
            slot = store.acquire(layout_of(), 1)
            assert steps_of(store) == [1, 3]
            assert len(slots_in(backend)) == 3
            assert slot.path.startswith(f"{ONE}/.slot-")

    def test_it_gives_way_although_a_reader_holds_another_one(self, backend: _Room) -> None:
        """The store has its slot more by then, and does not wait for the reader."""
        with closing(self.leaving(backend, layout_of())) as store:
            slot = store.acquire(layout_of(), 1)
            with reading(backend, f"{ONE}/step-00000002"):
                seal(store, slot, 3)
                store.acquire(layout_of(), 1)
                assert steps_of(store) == [2, 3]

    def test_all_give_way_to_a_layout_that_is_too_large_for_the_room_of_one(
        self, backend: _Room
    ) -> None:
        larger = layout_of(130)
        with closing(self.leaving(backend, layout_of())) as store:
            store.keeping.leaving.begin(generation_of(store.checkpoints[1]), "waiting")
            seal(store, store.acquire(layout_of(), 1), 3)
            assert steps_of(store) == [1, 2, 3]
            old, new = (store.slot_bytes(layout, 1) for layout in (layout_of(), larger))
            assert old < new < 2 * old
            backend.free[ONE] = 0
            slot = store.acquire(larger, 1)
            assert steps_of(store) == [3]
            assert slot.layout == larger


class TestLeavingWithOwners:
    """Each owner of state needs room for one part more as well."""

    @staticmethod
    def leaving(backend: _Room, directories: Sequence[str]) -> Job:
        job = Job([backend, backend], directories=directories)
        job.store.keeping.leaving.begin(generation_of(job.seal(1)), "sending")
        job.seal(2)
        assert steps_of(job.store) == [1, 2]
        return job

    @staticmethod
    def needed(backend: _Room, job: Job) -> int:
        """Return the bytes of a slot, and of the part of the other owner."""
        (part, other) = (f"{ONE}/owner-1/{n}" for n in ("part-1", "part-2"))
        (size, same) = (
            sum(len(data or b"") for data in everything(backend, path).values())
            for path in (part, other)
        )
        assert size == same
        own: int = job.store.slot_bytes(job.layouts[0], 1)
        return own + size

    def test_what_is_on_other_nodes_may_have_no_room(self, backend: _Room) -> None:
        with self.leaving(backend, (ONE, TWO)) as job:
            job.store.acquire(job.layouts[0], 1)
            assert steps_of(job.store) == [2]
            assert job.store.keeping.leaving.has_room is False

    @pytest.mark.parametrize("missing", [0, 1])
    def test_the_room_of_the_first_directory_is_for_all_of_them(
        self, backend: _Room, missing: int
    ) -> None:
        with self.leaving(backend, (ONE, ONE)) as job:
            backend.free[ONE] = self.needed(backend, job) - missing
            job.store.acquire(job.layouts[0], 1)
            assert steps_of(job.store) == ([2] if missing else [1, 2])

    def test_it_is_for_the_largest_part_that_there_is(self, backend: _Room) -> None:
        with self.leaving(backend, (ONE, ONE)) as job:
            backend.free[ONE] = self.needed(backend, job)
            write(backend.inner, f"{ONE}/owner-1/part-1/larger", b"than the other part")
            job.store.acquire(job.layouts[0], 1)
            assert steps_of(job.store) == [2]


class TestSeals:
    def test_a_slot_that_a_seal_will_free_is_waited_for(self, backend: _Room) -> None:
        """The store has no slot more, although it waits for no reader, and there is room."""
        with closing(opened(backend)) as store:
            seal(store, store.acquire(layout_of(), 1), 1)
            second = prepared(store, store.acquire(layout_of(), 1), 2)
            looking = threading.Event()

            def end() -> None:
                assert looking.wait(60)
                store.sealing.publish(second)
                store.sealing.end()

            def is_looking(kind: str, path: str) -> bool:
                if path.startswith(f"{ONE}/pins"):  # which it reads while it has the store locked
                    looking.set()
                return False

            backend.fail_if(is_looking)
            thread = threading.Thread(target=end)
            thread.start()
            try:
                slot = store.acquire(layout_of(), 1)
            finally:
                looking.set()
                thread.join()
            assert steps_of(store) == [2]
            assert len(slots_in(backend)) == 2
            assert slot.path in {f"{ONE}/{name}" for name in slots_in(backend)}

    def test_a_failed_one_is_told_of_before_a_slot_is_made(self, backend: _Room) -> None:
        with closing(opened(backend)) as store:
            slot = store.acquire(layout_of(), 1)
            backend.fail("sync_dir", 1, forever=False)
            with pytest.raises(StorageError, match="injected failure of sync_dir"):
                prepared(store, slot, 1)
            store.sealing.end()
            before = everything(backend)
            with pytest.raises(RuntimeWarning, match="reuses no slot any more"):  # as an error here
                store.acquire(layout_of(), 1)
            assert everything(backend) == before
            assert store.acquire(layout_of(), 1).path not in before


class TestPlace:
    MOVED = "/one/moved"

    def move(self, backend: _Room) -> None:
        backend.inner.rename(ONE, self.MOVED)
        backend.inner.make_dir(ONE)

    def move_back(self, backend: _Room) -> None:
        backend.inner.remove_dir(ONE)
        backend.inner.rename(self.MOVED, ONE)

    def test_nothing_is_made_in_a_directory_that_has_taken_the_place(self, backend: _Room) -> None:
        with closing(opened(backend)) as store:
            self.move(backend)
            with pytest.raises(StoreError, match="not the directory that was opened"):
                store.acquire(layout_of(), 1)
            assert backend.list_dir(ONE) == []
            self.move_back(backend)
            store.acquire(layout_of(), 1)

    def test_a_slot_that_may_be_elsewhere_is_closed_and_its_part_is_free(
        self, backend: _Room
    ) -> None:
        layout = layout_of(drives=2)
        with closing(opened(backend, TWO)) as store:

            def moves_away(kind: str, path: str) -> bool:
                if kind == "write_bytes" and path.endswith(".slot-1/exp_avg.safetensors"):
                    self.move(backend)
                return False

            backend.fail_if(moves_away)
            with pytest.raises(StoreError, match="not the directory that was opened"):
                store.acquire(layout, 1)
            backend.repair()
            assert backend.open_in_slots == []
            self.move_back(backend)
            slot = store.acquire(layout, 1)
            assert [part.name for part in slot.parts] == ["part-1"]
            assert slot.path == f"{ONE}/.slot-2"

    def test_a_lock_file_that_was_removed_is_told_of_at_once(self, backend: _Room) -> None:
        with closing(opened(backend)) as store:
            backend.remove(f"{ONE}/{LOCK_NAME}")
            with pytest.warns(RuntimeWarning, match="has been made and locked again"):
                store.acquire(layout_of(), 1)

    def test_a_slot_of_several_ranks_that_cannot_be_locked_is_closed(self, backend: _Room) -> None:
        with Job([backend, backend]) as job:
            backend.fail_if(lambda kind, path: kind == "lock" and "/.slot-" in path)
            with pytest.raises(StorageError, match="injected failure of lock"):
                job.store.acquire(job.layouts[0], 1)
            assert backend.open_in_slots == []
            slot = job.store.acquire(job.layouts[0], 1)
            assert slot.path == f"{ONE}/.slot-2"

    def test_a_slot_of_one_process_is_not_locked(self, backend: _Room) -> None:
        with closing(opened(backend)) as store:
            slot = store.acquire(layout_of(), 1)
            backend.lock(slot.path).release()


class TestRoom:
    @pytest.mark.parametrize("full", [ONE, TWO, THREE])
    def test_every_drive_needs_it(self, backend: _Room, full: str) -> None:
        layout = layout_of(drives=3)
        with closing(opened(backend, TWO, THREE)) as store:
            store.require_space(layout, 1)
            backend.free[full] = 0
            with pytest.raises(StoreFullError) as caught:
                store.require_space(layout, 1)
            assert caught.value.filename == full

    def test_state_of_several_ranks_needs_none_on_further_drives(self, backend: _Room) -> None:
        shared = SharedStore({1: ONE}, {})
        with closing(opened(backend, TWO, shared=shared)) as store:
            backend.free[TWO] = 0
            store.require_space(layout_of(), 1)


class TestIdentity:
    """What ``store.json`` says, before and after the identity of a copy is taken over."""

    LAYOUT = layout_of(drives=2)

    def next_generation(self, store: Store) -> int:
        slot = store.acquire(self.LAYOUT, 1)
        generation: int = slot.context.generation
        store.release(slot)
        return generation

    def test_it_is_durable_before_a_slot_that_was_left_is_changed(self) -> None:
        backend = CrashBackend()
        with closing(opened(backend, TWO)) as store:
            store.acquire(self.LAYOUT, 1)
        backend.remove(f"{ONE}/{STORE_FILE_NAME}")
        with closing(opened(backend, TWO)) as store:
            start = len(backend.log)
            assert store.acquire(self.LAYOUT, 1).path == f"{ONE}/.slot-1"
            log = [str(operation) for operation in backend.log[start:]]
        (synced,) = (n for n, one in enumerate(log) if one == f"sync {ONE}/{STORE_FILE_NAME}")
        assert log[synced + 1] == f"sync_dir {ONE}"
        assert not any(".slot-" in one or "part-" in one for one in log[:synced])

    def test_it_is_written_by_the_next_call_if_that_has_failed(self, backend: _Room) -> None:
        with closing(opened(backend, TWO)) as store:
            backend.fail_if(lambda kind, path: kind == "create" and path.endswith(STORE_FILE_NAME))
            with pytest.raises(StorageError):
                store.acquire(self.LAYOUT, 1)
            assert backend.stat(f"{ONE}/{STORE_FILE_NAME}") is None
            store.acquire(self.LAYOUT, 1)
            identity = store.store_id
        with closing(opened(backend, TWO)) as store:
            assert store.store_id == identity

    def test_a_store_of_one_directory_does_not_need_the_file(self, backend: _Room) -> None:
        with closing(opened(backend)) as store:
            store.take_over(COPY, 500)
            store.acquire(layout_of(), 1)
            assert backend.stat(f"{ONE}/{STORE_FILE_NAME}") is None

    @pytest.mark.parametrize("generation", [500, 400])
    def test_what_the_file_says_already_is_not_written_again(
        self, backend: _Room, generation: int
    ) -> None:
        with closing(opened(backend, TWO)) as store:
            store.take_over(COPY, 500)
            store.acquire(self.LAYOUT, 1)
        before = backend.stat(f"{ONE}/{STORE_FILE_NAME}")
        with closing(opened(backend, TWO)) as store:
            store.take_over(COPY, generation)
            store.acquire(self.LAYOUT, 1)
        assert backend.stat(f"{ONE}/{STORE_FILE_NAME}") == before

    def test_another_copy_may_have_fewer_generations(self, backend: _Room) -> None:
        with closing(opened(backend, TWO)) as store:
            store.take_over(COPY, 500)
            assert self.next_generation(store) == 500
        with closing(opened(backend, TWO)) as store:
            store.take_over(OTHER_COPY, 400)
            assert self.next_generation(store) == 400
            assert self.next_generation(store) == 401
        with closing(opened(backend, TWO)) as store:
            assert store.store_id == OTHER_COPY
            assert self.next_generation(store) == 401

    def test_another_history_begins_after_the_latest_that_was_taken_over(
        self, backend: _Room
    ) -> None:
        with closing(opened(backend, TWO)) as store:
            store.take_over(COPY, 503)
            assert self.next_generation(store) == 503
        with closing(opened(backend, TWO)) as store:
            store.take_over(COPY, 502)
            assert self.next_generation(store) == 502
            assert self.next_generation(store) == 504

    @pytest.mark.parametrize("num_arriving", [1, 200])
    def test_a_slot_has_room_for_references_to_all_of_its_own_owners(
        self, backend: _Room, num_arriving: int
    ) -> None:
        """What no more owners have made, in directories of short names, comes into such a slot."""
        shared = SharedStore(dict.fromkeys(range(1, 201), f"{ONE}{'/on-another-node' * 10}"), {})
        with closing(opened(backend, shared=shared)) as store:
            store.take_over(COPY, 500, [ONE] * num_arriving)
            arriving = store.acquire(layout_of(), 1)
            assert arriving.sizes == store.acquire(layout_of(), 1).sizes
