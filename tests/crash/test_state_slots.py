"""Which slot the next pass over the state writes, and which slots a store gets back.

A slot that is not given back is lost until the process ends; one that is given back too early is
rewritten under the state that it holds.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gds import LockHeldError, MemoryBackend
from offload.engine.working_slot import StateSlots
from offload.format.layout import Layout
from offload.retention.policy import LastK
from offload.store.opening import StoredCheckpoint
from offload.store.slots.slot import Slot
from offload.store.store import Store
from tests.crash.test_slot_supply import ONE, layout_of, seal, slots_in
from tests.ranks_store.job import Job

LAYOUT, LARGER = layout_of(90), layout_of(130)


class _Asked(Store):
    """Remembers the slots that were asked for, and whether the slot of an aborted seal would do."""

    asked: list[tuple[Layout, bool]]

    def acquire(self, layout: Layout, num_groups: int, *, is_new: bool = False) -> Slot:
        self.asked.append((layout, is_new))
        return super().acquire(layout, num_groups, is_new=is_new)

    @property
    def free_slots(self) -> list[str]:
        """Paths of the slots that nobody needs."""
        return self.leftovers()[0]


def opened(backend: MemoryBackend) -> _Asked:
    store = _Asked(backend, ONE, keep=LastK(2), train_state_bytes=8192, allow_volatile=True)
    store.asked = []
    return store


@pytest.fixture
def store() -> Iterator[_Asked]:
    store = opened(MemoryBackend())
    yield store
    store.close()


def stepped(slots: StateSlots, layout: Layout = LAYOUT) -> Slot:
    """Move the state into the slot that the next step writes, and return that slot."""
    target = slots.target(layout, 1)
    assert slots.moved_to(target, None) is None
    assert isinstance(target, Slot)
    return target


def sealed(store: Store, slots: StateSlots, step: int = 1) -> StoredCheckpoint:
    """Make the slot that holds the state a checkpoint."""
    assert isinstance(slots.present, Slot)
    slots.sealed_now()
    return seal(store, slots.present, step)


class TestTarget:
    def test_steps_go_on_in_the_working_slot(self, store: _Asked) -> None:
        slots = StateSlots(store)
        assert slots.needs_target
        working = stepped(slots)
        assert not slots.needs_target
        assert stepped(slots) is working
        slots.ensure_target(LAYOUT, 1)
        assert slots.target(LAYOUT, 1) is working
        assert len(store.asked) == 1

    def test_a_sealed_slot_is_left_for_another_one(self, store: _Asked) -> None:
        slots = StateSlots(store)
        stepped(slots)
        checkpoint = sealed(store, slots)
        assert slots.needs_target
        target = slots.target(LAYOUT, 1)
        assert target is not checkpoint.slot
        assert slots.moved_to(target, None) is None, "a checkpoint is not released"
        assert slots.target(LAYOUT, 1) is target

    def test_one_that_was_acquired_before_is_used_once(self, store: _Asked) -> None:
        slots = StateSlots(store)
        slots.ensure_target(LAYOUT, 1)
        assert not slots.needs_target
        slots.ensure_target(LAYOUT, 1)
        assert len(store.asked) == len(slots_in(store.backend)) == 1
        working = stepped(slots)
        assert len(store.asked) == 1
        sealed(store, slots)
        assert slots.target(LAYOUT, 1) is not working
        assert len(store.asked) == 2


class TestAnotherLayout:
    def test_it_gets_a_new_slot_and_the_old_one_is_released(self, store: _Asked) -> None:
        slots = StateSlots(store)
        old = stepped(slots)
        slots.reserve(LARGER, 1)
        assert store.asked[-1] == (LARGER, True)
        assert slots.present is old
        assert not slots.needs_target
        target = slots.target(LARGER, 1)
        assert target.layout == LARGER
        assert slots.moved_to(target, None) is old
        assert slots.present is target
        assert slots.is_working

    def test_one_that_comes_before_the_next_step_takes_the_place_of_the_first(
        self, store: _Asked
    ) -> None:
        slots = StateSlots(store)
        stepped(slots)
        slots.reserve(LARGER, 1)
        (unused,) = {*slots_in(store.backend)} - {".slot-1"}
        slots.reserve(layout_of(200), 1)
        assert store.free_slots == [f"{ONE}/{unused}"]
        assert slots.target(layout_of(200), 1).layout == layout_of(200)

    def test_a_slot_that_is_being_sealed_is_not_released(self, store: _Asked) -> None:
        slots = StateSlots(store)
        old = stepped(slots)
        slots.sealed_now()
        slots.reserve(LARGER, 1)
        assert slots.moved_to(slots.target(LARGER, 1), old) is None


class TestFailedPass:
    def test_its_target_is_kept_for_the_next_one(self, store: _Asked) -> None:
        slots = StateSlots(store)
        stepped(slots)
        sealed(store, slots)
        target = slots.target(LAYOUT, 1)
        slots.torn(target)
        assert not slots.needs_target
        assert slots.target(LAYOUT, 1) is target

    def test_its_target_is_released_by_a_restore(self, store: _Asked) -> None:
        slots = StateSlots(store)
        stepped(slots)
        checkpoint = sealed(store, slots)
        target = slots.target(LAYOUT, 1)
        slots.torn(target)
        slots.forget()
        assert store.free_slots == [target.path]
        assert store.checkpoints == [checkpoint]

    def test_a_working_slot_stays_the_only_one(self, store: _Asked) -> None:
        """It is no second slot for the step that follows the seal of what it holds."""
        slots = StateSlots(store)
        working = stepped(slots)
        slots.torn(working)
        sealed(store, slots)
        assert slots.needs_target
        assert slots.target(LAYOUT, 1) is not working


class TestForgetting:
    def test_a_working_slot_is_released(self, store: _Asked) -> None:
        slots = StateSlots(store)
        working = stepped(slots)
        slots.forget()
        assert store.free_slots == [working.path]
        assert (slots.present, slots.is_working, slots.sealed) == (None, False, None)
        assert slots.needs_target

    def test_a_checkpoint_stays(self, store: _Asked) -> None:
        slots = StateSlots(store)
        stepped(slots)
        checkpoint = sealed(store, slots)
        slots.forget()
        assert store.free_slots == []
        assert store.checkpoints == [checkpoint]
        assert slots.target(LAYOUT, 1) is not checkpoint.slot


class TestAnotherCut:
    """A checkpoint of two ranks is the state until the first step, and is closed by then."""

    @pytest.fixture
    def store(self) -> Iterator[_Asked]:
        backend = MemoryBackend()
        with Job([backend, backend], directories=[ONE, ONE]) as job:
            job.seal(1)
        store = opened(backend)
        yield store
        store.close()

    @staticmethod
    def restored(store: _Asked) -> StateSlots:
        slots, (checkpoint,) = StateSlots(store), store.checkpoints
        slots.resume(store.recut(checkpoint, None), checkpoint)
        return slots

    @staticmethod
    def is_open(store: _Asked) -> bool:
        """Return whether somebody reads the part of the second rank."""
        try:
            store.backend.lock(f"{ONE}/owner-1/part-1").release()
        except LockHeldError:
            return True
        return False

    def test_the_first_step_closes_it(self, store: _Asked) -> None:
        slots = self.restored(store)
        assert self.is_open(store)
        stepped(slots)
        assert not self.is_open(store)
        assert store.free_slots == []

    def test_a_restore_closes_it(self, store: _Asked) -> None:
        slots = self.restored(store)
        assert self.is_open(store)
        slots.forget()
        assert not self.is_open(store)
        assert store.free_slots == []
