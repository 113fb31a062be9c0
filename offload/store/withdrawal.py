"""Taking a checkpoint back, so that its slot can be rewritten.

What is durable after each step is said in `offload.store.store`.
"""

from __future__ import annotations

from gds import StorageError
from offload.store.expiry import Keeping
from offload.store.free_slots import FreeSlots, try_lock
from offload.store.opening import StoredCheckpoint, open_stored
from offload.store.part_pool import PartPool
from offload.store.poison import Poison
from offload.store.quarantine import lift_quarantine
from offload.store.slot import Slot
from offload.store.writer_lock import WriterLock


class Withdrawal:
    """Turns checkpoints of a store into free slots.

    Not safe to use from several threads; the store holds its own lock around every call.

    Args:
        checkpoints: The store's own list: what is withdrawn is taken out of it.
        keeping: Its pins.
        free: Its free slots: what is withdrawn becomes one.
        parts: What it has on other drives.
        lock: Its right to write.
        poison: Heeded, and taken note of where a withdrawal fails half way.
    """

    def __init__(
        self,
        checkpoints: list[StoredCheckpoint],
        keeping: Keeping,
        free: FreeSlots,
        parts: PartPool,
        lock: WriterLock,
        poison: Poison,
    ) -> None:
        self._backend = free.backend
        self._directory = free.directory
        self._checkpoints = checkpoints
        self._keeping = keeping
        self._free = free
        self._parts = parts
        self._lock = lock
        self._poison = poison

    def withdraw(self, checkpoint: StoredCheckpoint) -> bool:
        """Turn a checkpoint into a free slot, durably; False if a reader or a pin holds it.

        Raises:
            StoreError: This process may not write to the store any more.
            gds.StorageError: It could not be withdrawn, or not durably.
        """
        if self._poison:
            return False
        self._lock.require()
        if self._backend.stat(checkpoint.path) is None:  # somebody has removed it by hand
            self._checkpoints.remove(checkpoint)
            self.gone(checkpoint)
            return True
        lock = try_lock(self._backend, checkpoint.path)
        if lock is None:
            return False
        try:
            if self._keeping.is_pinned(checkpoint):  # perhaps only just
                return False
            slot = None
            if self._parts.are_there(checkpoint.manifest):  # somebody may have removed them
                slot = open_stored(self._backend, checkpoint, self._parts, writable=True)
            name = self._free.unused_path()
            with self._poison.on_error("a checkpoint could not be withdrawn"):
                self._backend.rename(checkpoint.path, name)
                self._checkpoints.remove(checkpoint)
                if slot is not None:
                    slot.renamed(name)
                self._backend.sync_dir(self._directory)
                if slot is not None and _may_be_shared(slot):
                    slot = None  # to be unlinked, and not rewritten: not even to be invalidated
                if slot is not None:
                    slot.invalidate()
                    if lift_quarantine(self._backend, name):  # a reader has found it damaged
                        slot.model_leaves.forget(readable=True)
            if slot is None:
                self.gone(checkpoint)
            self._free.add(slot or name)
        finally:
            lock.release()
        return True

    def gone(self, checkpoint: StoredCheckpoint) -> None:
        """Let go of what is no checkpoint any more."""
        if checkpoint.slot is not None:
            checkpoint.slot.close()
        self._parts.release(checkpoint.manifest)


def _may_be_shared(slot: Slot) -> bool:
    """Return whether a slot's open files may be of use elsewhere, as far as that can be told.

    They are if one of them has another name, or if others were put in their place: then they may
    have been moved. Looked at behind the rename: who uses the old name comes too late then.
    """
    try:
        return slot.is_linked() or not slot.is_in_place()
    except StorageError:
        return True
