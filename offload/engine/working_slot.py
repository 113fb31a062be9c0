"""The slots of the state: the one that holds it now, and the one that the next pass writes."""

from __future__ import annotations

from offload.checkpoint.recut.source import RecutSource
from offload.format.layout import Layout
from offload.store.opening import StoredCheckpoint
from offload.store.slots.slot import OwnerSlot, Slot
from offload.store.state_store import StateSlot, StateSource, StateStore
from offload.stream.meter import Meter


class StateSlots:
    """Slots of the state: at any time, one slot, `present`, holds the state.

    The present slot is one of these:

    - None: no parameter has state yet.
    - A working slot (`is_working`): the next step reads it and writes it in place.
    - A sealed slot: the next step reads it (the source) and writes every chunk of another slot (the
      target), which then becomes the working slot. A seal or a restore makes a sealed slot the
      present one.
    - A checkpoint of another cut (`RecutSource`), which a restore makes the present one. The next
      step reads it in place of a sealed slot; after that it is closed.
    """

    def __init__(self, store: StateStore, meter: Meter) -> None:
        self._store = store
        self._meter = meter
        self.present: StateSource | None = None
        self.is_working = False
        self.sealed: StoredCheckpoint | None = None
        """Checkpoint of the present state; None if it has none, as after every step."""
        self._reserved: StateSlot | None = None
        """Slot of a new layout, acquired in advance so that a full disk is noticed before a pass
        begins; or the target of a pass that failed half way."""

    @property
    def needs_target(self) -> bool:
        """Whether `target` has to acquire a slot."""
        return self._reserved is None and (not self.is_working or self.present is None)

    def target(self, layout: Layout, num_groups: int) -> StateSlot:
        """Return the slot that the next pass writes: the working, a reserved or a new slot."""
        if self.is_working and isinstance(self.present, Slot | OwnerSlot):
            return self.present
        with self._meter.timed("wait_seal_s"):
            target = self._reserved or self._store.acquire(layout, num_groups)
        self._reserved = None
        return target

    def reserve(self, layout: Layout, num_groups: int) -> None:
        """Acquire a slot of a new layout now; the next pass moves the state to it."""
        reserved = self._store.acquire(layout, num_groups, is_new=True)
        if self._reserved is not None:
            self._store.release(self._reserved)
        self._reserved, self.is_working = reserved, False

    def ensure_target(self, layout: Layout, num_groups: int) -> None:
        """Acquire a slot now, if the next pass needs one."""
        if self.needs_target:
            self._reserved = self._store.acquire(layout, num_groups)

    def begin(self, layout: Layout, num_groups: int) -> StateSlot:
        """Acquire a slot for a model in which no parameter has state yet; its arrays stay empty."""
        self.present = target = self.target(layout, num_groups)
        return target

    def moved_to(self, target: StateSlot, sealing: StateSlot | None) -> StateSlot | None:
        """Record that the state is now in `target`, which steps write in place from here on."""
        source = self.present
        self.present, self.is_working, self.sealed = target, True, None
        if isinstance(source, RecutSource):
            source.close()
            return None
        if source is None or source is target or source is sealing:
            return None
        return source if self._store.checkpoint_of(source) is None else None

    def torn(self, target: StateSlot) -> None:
        """Record that a pass to `target` has failed half way; `forget` releases the slot."""
        if target is not self.present:
            self._reserved = target

    def sealed_now(self) -> None:
        """Record that the present slot is being sealed, so that no step writes it any more."""
        self.is_working, self.sealed = False, None

    def resume(self, slot: StateSource, checkpoint: StoredCheckpoint | None) -> None:
        """Make a checkpoint the present state; None for one whose state is still arriving."""
        self.present, self.is_working, self.sealed = slot, False, checkpoint

    def forget(self) -> None:
        """Release every slot that is not a checkpoint, for a restore."""
        for slot in (self.present, self._reserved):
            if isinstance(slot, RecutSource):
                slot.close()
            elif slot is not None and self._store.checkpoint_of(slot) is None:
                self._store.release(slot)
        self.present = self._reserved = self.sealed = None
        self.is_working = False

    def close(self) -> None:
        """Close all files. Idempotent."""
        for slot in (self.present, self._reserved):
            if slot is not None:
                slot.close()
