"""Withdrawal of checkpoints, so that their slots can be rewritten.

`offload.store.store` describes what is durable after each step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

from gds import StorageError
from offload.errors import StoreError
from offload.retention.policy import Record
from offload.store.census import Census
from offload.store.expiry import Keeping
from offload.store.opening import StoreContent, StoredCheckpoint, open_stored
from offload.store.quarantine import remove_mark
from offload.store.slots.folder import try_lock
from offload.store.slots.free import FreeSlots
from offload.store.slots.slot import Slot
from offload.store.state_removal import StateRemoval
from offload.units import duration, size

_PORTION = 16
"""Largest number of checkpoints that are withdrawn with one sync of the store's directory."""


class Withdrawal:
    """Turns checkpoints of a store into free slots.

    Not thread-safe: the store holds its own lock around every call. Once the store is poisoned, for
    example by a withdrawal that failed half way, nothing is withdrawn. The census is asked first,
    so that only checkpoints that still exist make others expire.
    """

    def __init__(
        self, opened: StoreContent, keeping: Keeping, census: Census, free: FreeSlots
    ) -> None:
        self._backend = opened.backend
        self._directory = opened.directory
        self._checkpoints = opened.checkpoints
        self._parts = opened.parts
        self._lock = opened.lock
        self._keeping = keeping
        self._census = census
        self._free = free
        self._poison = opened.poison
        self._journal = opened.journal
        self._state = StateRemoval(opened, keeping, free)

    def withdraw(self, checkpoint: StoredCheckpoint) -> bool:
        """Turn a checkpoint into a free slot, durably; return whether it is none any more.

        It stays if a reader or a pin holds it, or if the store is poisoned. A checkpoint that was
        removed by hand is removed from the list.
        """
        return self._withdraw([checkpoint]) == 1

    def _withdraw(self, checkpoints: Sequence[StoredCheckpoint], *, reuse: bool = True) -> int:
        """Turn checkpoints into free slots, durably, except those that a reader or a pin holds."""
        if self._poison:
            return 0
        self._lock.require()
        started = time.perf_counter()
        removed = [c for c in checkpoints if self._backend.stat(c.path) is None]  # by hand
        for checkpoint in removed:
            self._checkpoints.remove(checkpoint)
            self.forget(checkpoint)
        with ExitStack() as locks:
            locked = [c for c in checkpoints if c not in removed and self._is_locked(c, locks)]
            going = self._keeping.unpinned(locked)  # there may be new pins
            slots = [self._open(c) if reuse else None for c in going]
            paths = [c.path for c in going]
            failing = "a checkpoint could not be withdrawn"
            names: list[str] = []
            with ExitStack() as leaving:
                for checkpoint, slot in zip(going, slots, strict=True):
                    try:
                        if names:
                            self._lock.require()
                        name = self._free.unused_path()
                    except (StorageError, StoreError):
                        if not names:
                            raise
                        break  # what has been renamed is synced, and nothing more is withdrawn
                    with self._poison.fatal(failing):
                        leaving.enter_context(self._parts.claims.leaving(checkpoint.manifest))
                        self._backend.rename(checkpoint.path, name)
                        self._checkpoints.remove(checkpoint)
                        names.append(name)
                        if slot is not None:
                            slot.folder.renamed(name)
                with self._poison.fatal(failing):
                    if names:
                        self._backend.sync_dir(self._directory)
                    going = going[: len(names)]
                    slots = [slot and self._made_ready(slot) for slot in slots[: len(names)]]
            seconds = time.perf_counter() - started
            for checkpoint, slot, name, path in zip(going, slots, names, paths, strict=False):
                if slot is None:
                    self.forget(checkpoint)
                self._free.add(slot or name)
                self._journal.note(
                    f"{path}: recycled step {checkpoint.manifest.step} in "
                    f"{duration(seconds / len(going))}, "
                    f"{size(checkpoint.tensor_bytes)} for a later step"
                )
        return len(removed) + len(going)

    def _is_locked(self, checkpoint: StoredCheckpoint, locks: ExitStack) -> bool:
        """Lock a checkpoint for rewriting; return False if a reader holds it."""
        lock = try_lock(self._backend, checkpoint.path)
        if lock is not None:
            locks.callback(lock.release)
        return lock is not None

    def _open(self, checkpoint: StoredCheckpoint) -> Slot | None:
        """Return a checkpoint's files, open for writing; None if a user has removed a part."""
        if not self._parts.all_exist(checkpoint.manifest):
            return None
        return open_stored(self._backend, checkpoint, self._parts, writable=True)

    def _made_ready(self, slot: Slot) -> Slot | None:
        """Overwrite the manifest of a withdrawn slot; return None if it must not be written."""
        if _may_be_shared(slot):
            return None  # it will be unlinked, and is not even invalidated
        slot.invalidate()
        if remove_mark(self._backend, slot.path):  # a reader has found it damaged
            slot.model_leaves.forget(readable=True)
        return slot

    def withdraw_expired(
        self, sealing: Record | None = None, *, even_leaving: bool = False
    ) -> bool:
        """Withdraw the oldest expired checkpoint without readers; return whether there was one.

        If there was none, the oldest one gives up its state of which only parameters are kept. The
        newest checkpoint is never withdrawn.
        """
        found = self._expired(sealing)
        stages = {c.path: self._keeping.leaving.stage_of(c.manifest.generation) for c in found}
        if not even_leaving:
            withdrawn = any(self.withdraw(c) for c in found if stages[c.path] is None)
            return withdrawn or any(map(self._state.drop, self._reducible(sealing)))
        return any(
            self._give_way(c)
            for c in sorted(found, key=lambda c: stages[c.path] == "sending")  # those come last
        )

    def withdraw_all_expired(self, sealing: Record | None = None) -> None:
        """Withdraw all expired checkpoints without readers, except those that leave for a tier.

        After a change of policy there may be hundreds. Those whose slots are not needed any more
        are renamed in portions, with one sync for each.
        """
        leaving, tried = self._keeping.leaving, set[int]()
        surplus: int | None = None
        while not self._poison:
            found = [c for c in self._expired(sealing) if c.manifest.generation not in tried]
            found = [c for c in found if leaving.stage_of(c.manifest.generation) is None]
            if not found:
                break
            if surplus is None:
                # A part on another drive is free only after its document has been overwritten.
                surplus = 0 if self._parts.directories else self._surplus(self._keeping.num_slots())
            portion = found[: min(max(surplus, 1), _PORTION)]
            surplus -= self._withdraw(portion, reuse=surplus < 1)
            tried |= {c.manifest.generation for c in portion}
        for checkpoint in self._reducible(sealing):
            is_needed = self._surplus(self._keeping.num_slots()) < 1
            self._state.drop(checkpoint, reuse=is_needed)

    def remove_dropped(self) -> None:
        """Remove state files that interrupted processes left in checkpoints without state."""
        for checkpoint in self._checkpoints:
            self._state.remove_dropped(checkpoint)

    def _reducible(self, sealing: Record | None) -> list[StoredCheckpoint]:
        """Return the checkpoints that give up their state, oldest first; never the newest."""
        return self._looked_at(self._keeping.reducible, sealing)

    def _expired(self, sealing: Record | None) -> list[StoredCheckpoint]:
        """Return the expired checkpoints, oldest first; the newest is never among them."""
        return self._looked_at(self._keeping.expired, sealing)

    def _looked_at(
        self, choose: Callable[[Record | None], list[StoredCheckpoint]], sealing: Record | None
    ) -> list[StoredCheckpoint]:
        # The newest durable checkpoint always stays, also while its successor is being sealed. The
        # successor displaces no checkpoint by its metrics before it is durable.
        incoming = sealing and replace(sealing, metrics={})
        if not choose(incoming):
            return []
        self._census.update_changed()  # only checkpoints that still exist make others expire
        newest = self._keeping.newest
        return [c for c in choose(incoming) if c is not newest]

    def _give_way(self, checkpoint: StoredCheckpoint) -> bool:
        """Withdraw a checkpoint although it may be leaving; return whether it was withdrawn."""
        path, step = checkpoint.path, checkpoint.manifest.step
        stage = self._keeping.leaving.stage_of(checkpoint.manifest.generation)
        if not self.withdraw(checkpoint):
            return False
        if stage is not None:
            doing = "is being sent to" if stage == "sending" else "waits for"
            self._journal.note(
                f"{path}: step {step} {doing} the tier, and gives way: the next step needs its "
                "slot, and there is no room for another one"
            )
        return True

    def trim(self) -> None:
        """After a commit, withdraw superseded and expired checkpoints, and remove spare slots."""
        for checkpoint in [c for c in self._checkpoints if c.superseded]:
            self.withdraw(checkpoint)
        self.withdraw_all_expired()
        self.drop_spare_slots()

    def drop_spare_slots(self) -> None:
        """Remove free slots that retention has no room for, but keep one for the next step."""
        if not self._lock.is_held():
            return  # their paths may name another process's files
        most = self._keeping.num_slots()
        self._free.drop(min(self._surplus(most), len(self._free) - 1))
        self._parts.trim(most)

    def _surplus(self, most: int) -> int:
        """Return by how much the slots and checkpoints exceed the largest number of slots."""
        return len(self._free) + len(self._checkpoints) - most

    def forget(self, checkpoint: StoredCheckpoint) -> None:
        """Close the files of a former checkpoint, and mark its parts as free."""
        if checkpoint.slot is not None:
            checkpoint.slot.close()
        self._parts.release(checkpoint.manifest)


def _may_be_shared(slot: Slot) -> bool:
    """Return whether a slot's open files may be in use under other names.

    They are in use if one of them has another hard link. They may be in use if other files have
    taken their place, because the open files may then have been moved. If the files cannot be
    examined, they count as in use. The check follows the rename, after which nothing can reach the
    files by the old path.
    """
    try:
        return slot.is_linked() or not slot.is_in_place()
    except StorageError:
        return True
