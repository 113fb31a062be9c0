"""In which slot the state is, and in which one it will be."""

from __future__ import annotations

from offload.format.layout import Layout
from offload.store.opening import StoredCheckpoint
from offload.store.slot import Slot
from offload.store.store import Store


class StateSlots:
    """The state's place: always exactly one slot, `present`.

    - None: no parameter has state yet.
    - a working slot (`is_working`): the next step reads it and writes it in place.
    - a sealed slot: the next step reads it (the source) and writes every chunk of another (the
      target), which then becomes the working slot. A seal and a restore lead here.

    Args:
        store: Has the slots.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.present: Slot | None = None
        self.is_working = False
        self.sealed: StoredCheckpoint | None = None
        """The checkpoint that the present state is, if nothing has been stepped since."""
        self._reserved: Slot | None = None
        """A slot of a new layout, got in advance so that a full disk is noticed in time."""

    def target(self, layout: Layout, num_groups: int) -> Slot:
        """Return the slot that the next pass writes: the working one, a reserved or a new one.

        Raises:
            StoreBusyError: Readers hold every expired checkpoint.
            SlotFullError: No space; nothing has changed.
            gds.StorageError: Another failure.
        """
        if self.is_working and self.present is not None:
            return self.present
        target = self._reserved or self._store.acquire(layout, num_groups)
        self._reserved = None
        return target

    def reserve(self, layout: Layout, num_groups: int) -> None:
        """Get a slot of a new layout now; the next pass moves the state there.

        Raises what `target` does.
        """
        reserved = self._store.acquire(layout, num_groups)
        if self._reserved is not None:
            self._store.release(self._reserved)
        self._reserved, self.is_working = reserved, False

    def begin(self, layout: Layout, num_groups: int) -> Slot:
        """Place state that no parameter has yet: the slot's arrays stay empty."""
        self.present = self.target(layout, num_groups)
        return self.present

    def moved_to(self, target: Slot, sealing: Slot | None) -> Slot | None:
        """Note that the state is now in `target`, which is written in place from here on.

        Args:
            target: From `target`.
            sealing: A slot that is about to be a checkpoint.

        Returns:
            Where it was before, if that is neither the same nor a checkpoint: to be released.
        """
        source = self.present
        self.present, self.is_working, self.sealed = target, True, None
        if source is None or source is target or source is sealing:
            return None
        is_checkpoint = any(checkpoint.slot is source for checkpoint in self._store.checkpoints)
        return None if is_checkpoint else source

    def torn(self, target: Slot) -> None:
        """Note that a pass to `target` has failed half way; `forget` gives it back."""
        if target is not self.present:
            self._reserved = target

    def froze(self) -> None:
        """Note that the present slot is being sealed: no step writes it any more."""
        self.is_working, self.sealed = False, None

    def resume(self, slot: Slot, checkpoint: StoredCheckpoint) -> None:
        """Make a checkpoint the present state."""
        self.present, self.is_working, self.sealed = slot, False, checkpoint

    def forget(self) -> None:
        """Give back what is no checkpoint, for a restore."""
        sealed = [checkpoint.slot for checkpoint in self._store.checkpoints]
        for slot in (self.present, self._reserved):
            if slot is not None and all(slot is not other for other in sealed):
                self._store.release(slot)
        self.present = self._reserved = self.sealed = None
        self.is_working = False

    def close(self) -> None:
        """Close all files. Idempotent."""
        for slot in (self.present, self._reserved):
            if slot is not None:
                slot.close()
