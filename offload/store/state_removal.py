"""Removal of the state of checkpoints of which a retention policy keeps only the parameters.

The order of effects, with what a loss of power leaves after each:

- A free slot is made, with all files but those of state. Until then nothing has changed, so a full
  disk stops here.
- A manifest without state replaces that of the checkpoint, durably. From then on the checkpoint has
  parameters only, although the files of state may still be in its directory.
- The documents of its parts on further drives are made invalid.
- The files of state are renamed into the free slot. If some are left behind, the next process
  removes them (`StateRemoval.remove_dropped`); a slot that lacks some is not adopted.

As for a withdrawal, an exclusive lock keeps readers away, and the pins are looked at under it.
"""

from __future__ import annotations

import time

from offload.format.layout import Layout, array_file_name
from offload.format.names import MANIFEST_NAME
from offload.store.expiry import Keeping
from offload.store.opening import StoreContent, StoredCheckpoint, ids_at, open_stored
from offload.store.slots.folder import create_folder, locked, remove_folder
from offload.store.slots.free import FreeSlots
from offload.store.slots.slot import Slot
from offload.store.store_errors import naming_free_space
from offload.units import duration

_FAILING = "the state of a checkpoint could not be given up"


class StateRemoval:
    """Makes checkpoints parameters-only, and free slots of their files of state.

    Not thread-safe: the store holds its own lock around every call. Once the store is poisoned, for
    example by a removal that failed half way, no state is given up.
    """

    def __init__(self, opened: StoreContent, keeping: Keeping, free: FreeSlots) -> None:
        self._backend = opened.backend
        self._parts = opened.parts
        self._lock = opened.lock
        self._poison = opened.poison
        self._journal = opened.journal
        self._keeping = keeping
        self._free = free

    def drop(self, checkpoint: StoredCheckpoint, *, reuse: bool = True) -> bool:
        """Take the state of a checkpoint, durably; return whether it has parameters only now.

        It keeps its state if a reader or a pin holds it, if a user has removed a part of it, or if
        the store is poisoned.

        Args:
            checkpoint: One of the store's checkpoints, whose manifest can drop its state.
            reuse: Whether the files of state become a free slot; else they are removed.

        Raises:
            gds.StorageError: There is no space for the other files of the free slot. Nothing has
                changed.
            StoreError: This process may not write to the store any more.
        """
        if self._poison or self._backend.stat(checkpoint.path) is None:
            return False
        self._lock.require()
        started = time.perf_counter()
        with locked(self._backend, checkpoint.path) as is_locked:
            if not is_locked or not self._parts.all_exist(checkpoint.manifest):
                return False
            if not self._keeping.unpinned([checkpoint]):  # there may be new pins
                return False
            self._drop(checkpoint, reuse=reuse)
        self._journal.note(
            f"{checkpoint.path}: keeps its parameters only; gave up the state of step "
            f"{checkpoint.manifest.step} in {duration(time.perf_counter() - started)}"
        )
        return True

    def _drop(self, checkpoint: StoredCheckpoint, *, reuse: bool) -> None:
        before, after = checkpoint.manifest, checkpoint.manifest.without_state()
        slot = open_stored(self._backend, checkpoint, self._parts, writable=True)
        free = self._make_slot(slot, after.layout) if reuse else None
        try:
            encoded = after.encode(slot.manifest.size_bytes)
            manifest = slot.write_replacement(MANIFEST_NAME, encoded)
        except BaseException:
            if free is not None:
                remove_folder(self._backend, free)
            raise
        try:
            self._lock.require()
        except BaseException:
            manifest.close()
            raise
        with self._poison.fatal(_FAILING), self._parts.claims.leaving(before):
            slot.replace(MANIFEST_NAME, manifest)
            for part in slot.parts:
                part.invalidate()
            checkpoint.close()
            checkpoint.manifest = after
            if free is not None:
                for name in map(array_file_name, after.dropped_arrays):
                    self._backend.rename(f"{checkpoint.path}/{name}", f"{free}/{name}")
                self._backend.sync_dir(free)
                self._backend.sync_dir(checkpoint.path)
            else:
                self.remove_dropped(checkpoint)
            checkpoint.known_ids = ids_at(self._backend, checkpoint.path, after, self._parts)
            checkpoint.folder_times = {}
        self._parts.release(before)
        if free is not None:
            self._free.add(free)

    def _make_slot(self, slot: Slot, layout: Layout) -> str:
        """Make a slot like that of a checkpoint, without the files of state; return its path."""
        arrays = {array_file_name(name) for name in slot.layout.array_names}
        sizes = {name: nbytes for name, nbytes in slot.sizes.items() if name not in arrays}
        path = self._free.unused_path()
        with naming_free_space(self._backend, path, sum(sizes.values()), "a slot"):
            create_folder(self._backend, path, MANIFEST_NAME, sizes, layout).close()
        return path

    def remove_dropped(self, checkpoint: StoredCheckpoint) -> None:
        """Remove the files of state that are left in a checkpoint without state, if there are any.

        Its manifest is durable: opening a store makes it so.
        """
        for name in map(array_file_name, checkpoint.manifest.dropped_arrays):
            path = f"{checkpoint.path}/{name}"
            if self._backend.stat(path) is not None:
                self._backend.remove(path)
