"""Free slots: which of them are lent, what stays free after an error, and what is not removed."""

from __future__ import annotations

import errno
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

import offload.store.slots.free as free_module
from gds import Backend, MemoryBackend, PosixBackend, StorageError
from gds.contract import Lock
from offload.errors import StoreBusyError, UnreadableError
from offload.format.boxes import Box
from offload.format.layout import Layout, ModelTensor, ParameterSpec
from offload.format.model_shard import ModelShard
from offload.format.slot_files import slot_sizes
from offload.store.poison import Poison
from offload.store.slots.free import FreeSlots, ReaderWait, lock_existing
from offload.store.slots.part_pool import PartPool
from offload.store.slots.slot import Slot, SlotState, create_slot
from offload.store.space import Room
from tests.crash.fault_backend import FaultBackend
from tests.stores.files import everything, remove_tree, write

STORE, OTHER = "/run", "/other"
STORE_ID = "0123456789abcdef" * 2
ARRAYS = ("master", "exp_avg")


def layout_of(*names: str, num_drives: int = 1) -> Layout:
    """Return a layout of several chunks, with the parameters in the given order."""
    parameters = tuple(ParameterSpec(name, "BF16", (40, 50), 0, ARRAYS) for name in names)
    model = tuple(ModelTensor(p.name, p.dtype, p.shape) for p in parameters)
    return Layout(parameters, model, 1024, shares=(1,) * num_drives)


LAYOUT = layout_of("a", "b")
ON_TWO_DRIVES = layout_of("a", "b", num_drives=2)


def sizes_of(layout: Layout) -> dict[str, int]:
    return slot_sizes(layout, 1, train_state_bytes=4096)


def memory() -> MemoryBackend:
    return MemoryBackend(directories=[STORE, OTHER])


def free_slots(
    backend: Backend, leftover: Sequence[str] = (), *, num_drives: int = 1
) -> tuple[FreeSlots, PartPool, Poison]:
    """Return the free slots of a store, with its parts and its poison."""
    poison = Poison(STORE)
    others = [(backend, OTHER)][: num_drives - 1]
    parts = PartPool(others, STORE_ID, [], {}, poison)
    return FreeSlots(backend, STORE, leftover, parts, poison), parts, poison


def left_over(backend: Backend, *names: str) -> list[str]:
    """Make slots that a process that has ended has left, and return their paths."""
    paths = [f"{STORE}/{name}" for name in names]
    for path in paths:
        create_slot(backend, path, LAYOUT, sizes_of(LAYOUT)).close()
    return paths


def open_slots(free: FreeSlots, num: int, layout: Layout = LAYOUT) -> list[Slot]:
    """Make open slots that nobody needs any more."""
    slots = [free.create(layout, sizes_of(layout)) for _ in range(num)]
    for slot in slots:
        free.add(slot)
    return slots


def exists(backend: Backend, path: str) -> bool:
    return backend.stat(path) is not None


def test_a_slot_that_is_given_back_twice_is_lent_once() -> None:
    free, _, _ = free_slots(memory())
    (slot,) = open_slots(free, 1)
    free.add(slot)
    assert free.take(LAYOUT, sizes_of(LAYOUT)) is slot
    assert free.take(LAYOUT, sizes_of(LAYOUT)) is None


def test_a_new_slot_has_the_first_name_that_nothing_has() -> None:
    backend = memory()
    left_over(backend, ".slot-1", ".slot-2")
    free, _, _ = free_slots(backend)
    assert free.create(LAYOUT, sizes_of(LAYOUT)).path == f"{STORE}/.slot-3"


def gone(backend: MemoryBackend, path: str) -> None:
    """A user has removed the slot."""


def read(backend: MemoryBackend, path: str) -> None:
    """A reader still holds the checkpoint that the slot was."""
    left_over(backend, path.rpartition("/")[2])
    backend.lock(path, shared=True)


def a_file(backend: MemoryBackend, path: str) -> None:
    write(backend, path, b"notes")


def with_a_directory(backend: MemoryBackend, path: str) -> None:
    left_over(backend, path.rpartition("/")[2])
    backend.make_dir(f"{path}/notes")


class TestTaking:
    @pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
    @pytest.mark.parametrize("other", [gone, read, a_file, with_a_directory])
    def test_a_leftover_is_found_beside_one_that_cannot_be_used(
        self, other: Callable[[MemoryBackend, str], None], first: bool
    ) -> None:
        backend = memory()
        (usable,) = left_over(backend, ".slot-1")
        unusable = f"{STORE}/.slot-2"
        other(backend, unusable)
        before = [e for e in everything(backend).items() if e[0].startswith(unusable)]
        paths = [unusable, usable] if first else [usable, unusable]
        free, _, _ = free_slots(backend, paths)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            slot = free.take(LAYOUT, sizes_of(LAYOUT))
        assert slot is not None
        assert slot.path == usable
        assert usable not in free.paths()
        # The unusable one was looked at only if it is the newer of the two.
        is_listed = first or other is read
        assert free.paths() == ([unusable] if is_listed else [])
        said = [str(warning.message) for warning in caught]
        is_strange = other in (a_file, with_a_directory) and not first
        assert len(said) == is_strange
        assert all(f"{unusable}: not used, and left alone" in message for message in said)
        assert [e for e in everything(backend).items() if e[0].startswith(unusable)] == before
        slot.close()

    def test_a_leftover_is_found_behind_one_that_does_not_fit_and_is_removed(self) -> None:
        backend = memory()
        usable, unfit = left_over(backend, ".slot-1", ".slot-2")
        backend.remove(f"{unfit}/exp_avg.safetensors")
        free, _, _ = free_slots(backend, [usable, unfit])
        slot = free.take(LAYOUT, sizes_of(LAYOUT))
        assert slot is not None
        assert slot.path == usable
        assert backend.list_dir(STORE) == [".slot-1"]
        assert free.paths() == []

    def test_a_slot_that_cannot_be_looked_at_now_stays_free(self) -> None:
        backend = FaultBackend(memory())
        free, _, _ = free_slots(backend)
        (slot,) = open_slots(free, 1)
        backend.fail_if(lambda what, path: what == "stat" and path == slot.path)
        with pytest.raises(StorageError, match="injected failure of stat"):
            free.take(LAYOUT, sizes_of(LAYOUT))
        assert free.take(LAYOUT, sizes_of(LAYOUT)) is slot

    def test_a_slot_of_another_layout_is_removed_although_its_files_are_as_long(self) -> None:
        backend, other = memory(), layout_of("b", "a")
        assert sizes_of(other) == sizes_of(LAYOUT)
        free, _, _ = free_slots(backend)
        (slot,) = open_slots(free, 1)
        assert free.take(other, sizes_of(other)) is None
        assert not exists(backend, slot.path)
        assert free.paths() == []

    def test_a_slot_with_other_boxes_of_the_model_is_removed(self) -> None:
        backend = memory()
        upper, lower = (
            replace(LAYOUT, shard=ModelShard(0, (("a", Box((start, 0), (20, 50))),)))
            for start in (0, 20)
        )
        assert sizes_of(upper) == sizes_of(lower)
        free, _, _ = free_slots(backend)
        (slot,) = open_slots(free, 1, upper)
        assert free.take(lower, sizes_of(lower)) is None
        assert not exists(backend, slot.path)

    @pytest.mark.parametrize("is_open", [True, False], ids=["open", "left over"])
    def test_a_slot_that_could_not_be_made_ready_ends_all_reuse(self, is_open: bool) -> None:
        backend = FaultBackend(memory())
        leftover = [] if is_open else left_over(backend, ".slot-1")
        free, _, poison = free_slots(backend, leftover)
        if is_open:
            open_slots(free, 1)
        backend.fail_if(lambda what, _: what == ("remove" if is_open else "sync"))
        wanted = layout_of("a", "b", "c") if is_open else LAYOUT
        with pytest.raises(StorageError, match="injected failure"):
            free.take(wanted, sizes_of(wanted))
        assert "a free slot could not be made ready" in poison.reason

    def test_parts_for_a_leftover_that_does_not_fit_are_free_again(self) -> None:
        backend = memory()
        (path,) = left_over(backend, ".slot-1")  # made for one drive, so its files are longer
        free, parts, _ = free_slots(backend, [path], num_drives=2)
        assert free.take(ON_TWO_DRIVES, sizes_of(ON_TWO_DRIVES)) is None
        assert not exists(backend, path)
        assert parts.num_free(1) == 1
        assert free.create(ON_TWO_DRIVES, sizes_of(ON_TWO_DRIVES)).parts[0].name == "part-1"

    def test_a_leftover_for_whose_parts_there_is_no_room_stays_free(self) -> None:
        backend = FaultBackend(memory())
        (path,) = left_over(backend, ".slot-1")
        free, _, _ = free_slots(backend, [path], num_drives=2)
        backend.fail_if(lambda what, where: what == "create" and where.startswith(OTHER))
        with pytest.raises(StorageError) as failed:
            free.take(ON_TWO_DRIVES, sizes_of(ON_TWO_DRIVES))
        assert failed.value.errno == errno.ENOSPC
        assert free.paths() == [path]


class TestDropping:
    @pytest.mark.parametrize("are_open", [True, False], ids=["open", "left over"])
    def test_the_oldest_are_removed_and_no_more_than_asked_for(self, are_open: bool) -> None:
        backend = memory()
        names = [".slot-1", ".slot-2", ".slot-3"]
        free, _, _ = free_slots(backend, [] if are_open else left_over(backend, *names))
        if are_open:
            open_slots(free, 3)
        free.drop(-1)
        assert len(free) == 3
        free.drop(2)
        assert free.paths() == [f"{STORE}/.slot-3"]
        assert backend.list_dir(STORE) == [".slot-3"]

    def test_what_is_still_read_stays(self) -> None:
        backend = memory()
        paths = left_over(backend, ".slot-1", ".slot-2")
        free, _, _ = free_slots(backend, paths)
        reader = backend.lock(paths[0], shared=True)
        free.drop(2)
        assert free.paths() == paths[:1]
        assert backend.list_dir(STORE) == [".slot-1"]
        reader.release()

    def test_one_that_was_removed_by_hand_is_not_in_the_way_of_the_others(self) -> None:
        backend = memory()
        paths = left_over(backend, ".slot-1", ".slot-2")
        free, _, _ = free_slots(backend, paths)
        remove_tree(backend, paths[0])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            free.drop(2)
        assert free.paths() == []
        assert backend.list_dir(STORE) == []

    @pytest.mark.parametrize("other", [a_file, with_a_directory])
    def test_what_cannot_be_a_slot_is_left_alone(
        self, other: Callable[[MemoryBackend, str], None]
    ) -> None:
        backend = memory()
        other(backend, path := f"{STORE}/.slot-1")
        before = everything(backend)
        free, _, _ = free_slots(backend, [path])
        with pytest.warns(RuntimeWarning, match="not used, and left alone"):
            free.drop(1)
        assert everything(backend) == before
        assert free.paths() == []

    def test_a_slot_that_could_only_be_half_removed_is_not_lent(self) -> None:
        backend = FaultBackend(memory())
        free, _, _ = free_slots(backend)
        open_slots(free, 1)
        backend.fail_if(lambda what, _: what == "remove")
        with pytest.raises(StorageError, match="injected failure of remove"):
            free.drop(1)
        assert free.paths() == []
        assert free.take(LAYOUT, sizes_of(LAYOUT)) is None

    def test_a_slot_that_may_be_a_checkpoint_is_not_removed(self) -> None:
        backend = memory()
        free, parts, _ = free_slots(backend, num_drives=2)
        slot = free.create(ON_TWO_DRIVES, sizes_of(ON_TWO_DRIVES))
        slot.begin_publication()
        assert slot.state is SlotState.IN_DOUBT
        before = everything(backend)
        free.discard(slot)
        assert everything(backend) == before
        assert parts.num_free(1) == 0

    def test_the_parts_of_a_slot_that_has_been_moved_away_are_free(self) -> None:
        """What is under its name now is left alone."""
        backend = memory()
        free, parts, _ = free_slots(backend, num_drives=2)
        slot = free.create(ON_TWO_DRIVES, sizes_of(ON_TWO_DRIVES))
        backend.rename(slot.path, "/moved")
        write(backend, slot.path, b"something else")
        free.discard(slot)
        assert exists(backend, slot.path)
        assert exists(backend, "/moved")
        assert parts.num_free(1) == 1


def test_all_open_slots_are_closed() -> None:
    """A file that has been removed takes its space as long as it is open."""
    backend = MemoryBackend(directories=[STORE], capacity_bytes=1 << 20)
    free, _, _ = free_slots(backend)
    for slot in open_slots(free, 2):
        remove_tree(backend, slot.path)
    assert backend.free_bytes(STORE) < 1 << 20
    free.close()
    assert backend.free_bytes(STORE) == 1 << 20


class TestSpare:
    def test_none_is_made_where_there_is_no_room(self) -> None:
        backend = MemoryBackend(directories=[STORE], capacity_bytes=1 << 20)
        free, _, _ = free_slots(backend)
        room = Room(backend, STORE, 0, (1 << 20) + 1)
        assert free.create_spare(LAYOUT, sizes_of(LAYOUT), [room]) is None
        assert backend.list_dir(STORE) == []

    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
    def test_only_a_full_disk_is_no_error(self, number: int) -> None:
        backend = FaultBackend(memory())
        free, _, _ = free_slots(backend)
        backend.fail_if(lambda what, _: what == "create", number)
        rooms = [Room(backend, STORE, 0, 1)]
        if number == errno.ENOSPC:
            assert free.create_spare(LAYOUT, sizes_of(LAYOUT), rooms) is None
        else:
            with pytest.raises(StorageError) as failed:
                free.create_spare(LAYOUT, sizes_of(LAYOUT), rooms)
            assert failed.value.errno == number
        assert backend.list_dir(STORE) == []

    @pytest.mark.parametrize("holders", ["readers", "the tier"])
    def test_it_is_said_who_holds_the_expired_ones(
        self, holders: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        backend = memory()
        free, _, _ = free_slots(backend)
        with caplog.at_level(logging.INFO, "offload"):
            slot = free.create_spare(
                LAYOUT, sizes_of(LAYOUT), [Room(backend, STORE, 0, 1 << 20)], holders
            )
        assert slot is not None
        (record,) = caplog.records
        assert "one more slot" in record.getMessage()
        expected = {
            "readers": (logging.WARNING, "readers hold every expired checkpoint"),
            "the tier": (logging.INFO, "an expired checkpoint is leaving for the tier"),
        }
        level, words = expected[holders]
        assert record.levelno == level
        assert words in record.getMessage()


@pytest.mark.parametrize("num_drives", [1, 2])
def test_a_manifest_that_cannot_be_read_is_in_the_way_only_where_it_names_parts(
    num_drives: int,
) -> None:
    backend = FaultBackend(memory())
    free, _, _ = free_slots(backend, left_over(backend, ".slot-1"), num_drives=num_drives)
    backend.fail_if(lambda what, path: what == "open" and path.endswith("manifest.json"))
    if num_drives == 1:
        free.note_withdrawn()
        free.drop(1)
        assert backend.list_dir(STORE) == []
    else:
        with pytest.raises(UnreadableError):
            free.note_withdrawn()
        assert backend.list_dir(STORE) == [".slot-1"]


class Clock:
    """A clock that goes on only while somebody sleeps, or by a little for each look at it."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.num_sleeps = 0
        self.after_sleep: Callable[[], object] = lambda: None
        self._num_looks = 0

    def monotonic(self) -> float:
        self._num_looks += 1
        assert self._num_looks < 10_000, "it looks again and again, and does not sleep"
        return self.now

    def sleep(self, seconds: float) -> None:
        assert self.num_sleeps < 1000, "it waits for ever"
        self.num_sleeps += 1
        self.now += seconds
        self.after_sleep()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(free_module, "time", clock)
    return clock


class TestReaderWait:
    def test_it_warns_once_and_gives_up_in_time(self, clock: Clock) -> None:
        wait = ReaderWait(STORE, 5.0)

        def wait_for_ever() -> NoReturn:
            while True:
                wait.wait()

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with pytest.raises(StoreBusyError, match="readers still hold every expired"):
                wait_for_ever()
        (warning,) = caught
        assert "every expired checkpoint is being read" in str(warning.message)
        assert 5.0 < clock.now - 1000.0 < 5.2

    def test_a_spare_slot_is_due_after_a_second_and_not_before(self, clock: Clock) -> None:
        wait = ReaderWait(STORE, 60.0)
        assert not wait.is_spare_due
        while clock.now < 1000.9:
            wait.wait()
            assert not wait.is_spare_due
        for _ in range(5):
            clock.sleep(0.05)
        assert wait.is_spare_due

    def test_it_warns_once_also_where_warnings_are_errors(self, clock: Clock) -> None:
        wait = ReaderWait(STORE, 60.0)
        wait.wait()
        clock.sleep(2.0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(RuntimeWarning, match="every expired checkpoint is being read"):
                wait.wait()
            wait.wait()
        assert clock.num_sleeps == 3


class TestLockOfWhatIsReplaced:
    @pytest.fixture
    def backend(self, tmp_path: Path) -> Iterator[PosixBackend]:
        (tmp_path / "step-1").mkdir()
        (tmp_path / "link").symlink_to("step-1")
        with PosixBackend(direct=False) as backend:
            yield backend

    def test_it_is_locked_at_once(
        self, backend: PosixBackend, tmp_path: Path, clock: Clock
    ) -> None:
        lock = lock_existing(backend, f"{tmp_path}/step-1", 5.0)
        assert lock is not None
        assert clock.num_sleeps == 0
        lock.release()

    @pytest.mark.parametrize("name", ["step-2", "link"])
    def test_nothing_and_a_link_are_not_locked(
        self, name: str, backend: PosixBackend, tmp_path: Path
    ) -> None:
        assert lock_existing(backend, f"{tmp_path}/{name}", 0.0) is None

    def test_readers_are_waited_for(
        self, backend: PosixBackend, tmp_path: Path, clock: Clock
    ) -> None:
        path = f"{tmp_path}/step-1"
        readers: list[Lock] = [backend.lock(path, shared=True)]

        def later() -> None:
            if clock.now > 1003.0 and readers:
                readers.pop().release()

        clock.after_sleep = later
        lock = lock_existing(backend, path, 5.0)
        assert lock is not None
        assert 1003.0 < clock.now < 1005.0
        lock.release()

    def test_a_reader_that_stays_is_an_error_in_time(
        self, backend: PosixBackend, tmp_path: Path, clock: Clock
    ) -> None:
        path = f"{tmp_path}/step-1"
        reader = backend.lock(path, shared=True)
        with pytest.raises(StoreBusyError, match="still being read after 5 s"):
            lock_existing(backend, path, 5.0)
        assert 1005.0 < clock.now < 1005.2
        reader.release()
