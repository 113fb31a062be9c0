"""What others have done to the checkpoints of a store while this process trains in it.

People and tools look after checkpoints beside training: they mark what is damaged
(``offload verify --quarantine``), remove checkpoints, move them away, or put copies of files in
their place. So before this process relies on a checkpoint it looks whether that is still the one
that it knows. Otherwise the last usable one could be withdrawn because of a newer one that is gone.

One look is a few calls of ``stat`` for each checkpoint. Only one that is not what it was is read.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

from gds import Backend
from offload.checkpoint.quarantine_mark import is_quarantined
from offload.checkpoint.reading import check_files, check_name, decode_manifest
from offload.errors import CheckpointError
from offload.format.manifest import Manifest
from offload.store.opening import StoredCheckpoint, ids_at
from offload.store.part_pool import PartPool
from offload.store.slot import Slot
from offload.store.writer_lock import WriterLock
from offload.units import seen_from


class Census:
    """Keeps the list of a store's checkpoints true to what is on the drives.

    Not safe to use from several threads; the store holds its own lock around every call.

    Args:
        backend: Where the checkpoints are.
        checkpoints: The store's own list: what is not usable any more is taken out of it.
        refused: The store's own list of what is not usable, and why: such is added to it.
        parts: What the checkpoints have on other drives.
        lock: The right to write to the store. As long as it is not held nothing is taken out.
    """

    def __init__(
        self,
        backend: Backend,
        checkpoints: list[StoredCheckpoint],
        refused: list[tuple[str, str]],
        parts: PartPool,
        lock: WriterLock,
    ) -> None:
        self._backend = backend
        self._checkpoints = checkpoints
        self._refused = refused
        self._parts = parts
        self._lock = lock
        self._left: list[tuple[Slot, Manifest | None]] = []
        """Slots that the state may still be read from, and whose parts are free after that."""
        self._untold: list[tuple[str, str]] = []
        """Paths of what was taken out, and what nobody has been told of it."""

    def is_as_known(self, checkpoint: StoredCheckpoint) -> bool:
        """Return whether a checkpoint is the one that this process knows, and bears no mark.

        It is if its directory, and those of its parts, hold the same files of the same sizes.

        Raises:
            gds.StorageError: It cannot be told at this moment.
        """
        if is_quarantined(self._backend, checkpoint.path):
            return False
        found = ids_at(self._backend, checkpoint.path, checkpoint.manifest, self._parts)
        return found == checkpoint.ids

    def take(self) -> None:
        """Look at all checkpoints, and take out what is not usable any more.

        A checkpoint whose files were replaced by others of the same checkpoint stays in the list;
        from then on this process reads and writes those.

        Raises:
            gds.StorageError: It cannot be told at this moment; those that have not been looked at
                are still in the list.
        """
        for checkpoint in [c for c in self._checkpoints if not c.superseded]:
            if not self.is_as_known(checkpoint):
                self._look_closer(checkpoint)

    def warn(self, *, refused: bool) -> None:
        """Say, once, what is not used any more; for a caller that a user's call has led to.

        Args:
            refused: Say it of what is in the list `refused` as well.
        """
        spoken_of = set() if refused else {path for path, _ in self._refused}
        untold, self._untold = self._untold, []
        for path, message in untold:
            if path not in spoken_of:
                warnings.warn(message, RuntimeWarning, stacklevel=5)

    def let_go(self, slot: Slot) -> bool:
        """Close a slot whose checkpoint was taken out, when no state is read from it any more.

        Returns:
            Whether it is such a slot.
        """
        for left in self._left:
            if left[0] is slot:
                self._left.remove(left)
                self._close(*left)
                return True
        return False

    def close(self) -> None:
        """Close all files that are still open. Idempotent."""
        for slot, _ in self._left:
            slot.close()

    def _look_closer(self, checkpoint: StoredCheckpoint) -> None:
        """Take out a checkpoint, or note by which files it is known from now on."""
        path, known = checkpoint.path, checkpoint.manifest
        if self._backend.stat(path) is None:
            if not self._lock.is_held():
                return  # the whole store may have been moved, and come back
            self._leave(checkpoint, free=known)
            self._checkpoints.remove(checkpoint)
            message = (
                f"{path}: was removed or moved away while this process trains, and does not count "
                "as one of the checkpoints that are kept"
            )
            self._untold.append((path, message))
            return
        found = None
        try:
            found = decode_manifest(self._backend, path)
            check_name(path, found)
            if replace(found, metrics={}).digest != replace(known, metrics={}).digest:
                raise CheckpointError(
                    f"{path}: holds another checkpoint (generation {found.generation}) than the "
                    f"one that was there (generation {known.generation})"
                )
            check_files(self._backend, path, found, self._parts.directories)
        except CheckpointError as error:
            if not self._lock.is_held():
                return
            self._leave(checkpoint)
            self._checkpoints.remove(checkpoint)
            self._refused.append((path, str(error)))
            self._parts.claim(path, known, found)
            reason = seen_from(path, str(error))
            message = f"not using {path} any more, changed while this process trains: {reason}"
            self._untold.append((path, message))
        else:
            ids = ids_at(self._backend, path, found, self._parts)
            self._leave(checkpoint)
            checkpoint.manifest, checkpoint.known_ids = found, ids

    def _leave(self, checkpoint: StoredCheckpoint, *, free: Manifest | None = None) -> None:
        """Let go of a checkpoint's open files; of those of the newest when the state has moved.

        Args:
            checkpoint: One of the list.
            free: Names the parts that are free after that; None if they are not.
        """
        slot, checkpoint.slot, checkpoint.model_leaves = checkpoint.slot, None, None
        newest = max(self._checkpoints, key=lambda c: c.manifest.generation)
        if slot is not None and checkpoint is newest:
            slot.unchecked = True  # the next step reads the state from it: others were at it
            self._left.append((slot, free))
        else:
            self._close(slot, free)

    def _close(self, slot: Slot | None, free: Manifest | None) -> None:
        if slot is not None:
            slot.close()
        if free is not None:
            self._parts.release(free)
