"""Detection of changes that other programs make to a store's checkpoints during training.

Users and tools manage checkpoints while a process trains. They mark damaged checkpoints
(``offload verify --quarantine``), remove checkpoints, move them away, or replace files by copies.
Therefore, before this process relies on a checkpoint, it checks that the drive still has the
checkpoint that it knows. Otherwise the last usable checkpoint could be withdrawn because of a newer
one that is gone.

A check takes one ``stat`` call for each file of a checkpoint. Only a checkpoint that has changed is
read. As a store may keep hundreds of checkpoints, only the newest are checked in this way before
each withdrawal. Of every other one, only the times of its directories are looked at, which change
when a file in them is made, removed or replaced.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from dataclasses import replace

from offload.checkpoint.file_check import is_quarantined
from offload.checkpoint.reading import check_name, decode_manifest
from offload.errors import CheckpointError
from offload.format.manifest import Manifest
from offload.store.opening import StoreContent, StoredCheckpoint, ids_at
from offload.store.slots.slot import Slot
from offload.units import seen_from

_ALWAYS = 8
"""Number of checkpoints, the newest, whose files are examined in every check."""


class Census:
    """Keeps the list of a store's checkpoints consistent with the drives.

    Not thread-safe: the store holds its own lock around every call.

    Unusable checkpoints are removed from the list, and those that were replaced or damaged are
    listed as refused. As long as the store's lock is not held, no checkpoint is removed.
    """

    def __init__(self, opened: StoreContent) -> None:
        self._backend = opened.backend
        self._checkpoints = opened.checkpoints
        self._refused = opened.refused
        self._parts = opened.parts
        self._shared = opened.shared
        self._lock = opened.lock
        self._old_files: list[tuple[Slot, Manifest | None]] = []
        """Old files of removed or changed checkpoints, as slots that state may still be read from.
        The manifest names the parts that become free when the slot is closed; None if no
        parts become free."""
        self._unreported: list[tuple[str, str]] = []
        """Paths of checkpoints removed from the list, each with a warning that is not given yet."""

    def _is_unchanged(self, checkpoint: StoredCheckpoint) -> bool:
        """Return whether a checkpoint has the same files as before, and is not quarantined."""
        if is_quarantined(self._backend, checkpoint.path):
            return False
        found = ids_at(self._backend, checkpoint.path, checkpoint.manifest, self._parts)
        return found == checkpoint.ids

    def update(self, checkpoints: Iterable[StoredCheckpoint] | None = None) -> None:
        """Examine checkpoints, by default all, and remove unusable ones from the list.

        A checkpoint whose files were replaced by other files of the same checkpoint stays in the
        list. From then on, this process reads and writes the new files. After a storage error, what
        has not been examined yet is still in the list.
        """
        known = self._checkpoints if checkpoints is None else checkpoints
        for checkpoint in [c for c in known if not c.superseded]:
            times = self._folder_times(checkpoint)  # before its files: a later change shows
            if self._is_unchanged(checkpoint):
                checkpoint.folder_times = times
            else:
                checkpoint.folder_times = {}
                self._examine(checkpoint)

    def update_changed(self) -> None:
        """Examine the newest checkpoints, and all others whose directories have changed."""
        older, newest = self._checkpoints[:-_ALWAYS], self._checkpoints[-_ALWAYS:]
        self.update([*(c for c in older if not self._has_same_folders(c)), *newest])

    def _has_same_folders(self, checkpoint: StoredCheckpoint) -> bool:
        """Return whether no name in a checkpoint's directories has changed since the last check."""
        if not checkpoint.folder_times:
            return False
        for path, known in checkpoint.folder_times.items():
            found = self._backend.stat(path)
            if found is None or (found.inode, found.changed_ns) != known:
                return False
        return True

    def _folder_times(self, checkpoint: StoredCheckpoint) -> dict[str, tuple[int, int]]:
        """Return the times of a checkpoint's directories; nothing if one of them is not known."""
        paths = {os.path.dirname(os.path.join(checkpoint.path, name)) for name in checkpoint.ids}
        found = {path: self._backend.stat(path) for path in sorted({checkpoint.path, *paths})}
        times = {path: (s.inode, s.changed_ns) for path, s in found.items() if s and s.changed_ns}
        return times if len(times) == len(found) else {}

    def warn(self, *, refused: bool) -> None:
        """Warn once about each checkpoint that is no longer used; `refused` ones only if asked to.

        The warning names the line of code four calls up, which is the user's call.
        """
        reported = set() if refused else {path for path, _ in self._refused}
        unreported, self._unreported = self._unreported, []
        for path, message in unreported:
            if path not in reported:
                warnings.warn(message, RuntimeWarning, stacklevel=5)

    def release(self, slot: Slot) -> bool:
        """Close a slot if it consists of the old files of a changed checkpoint; return whether so.

        The caller reads no state from the slot any more.
        """
        for old in self._old_files:
            if old[0] is slot:
                self._old_files.remove(old)
                self._close(*old)
                return True
        return False

    def close(self) -> None:
        """Close all files that are still open. Idempotent."""
        for slot, _ in self._old_files:
            slot.close()

    def _examine(self, checkpoint: StoredCheckpoint) -> None:
        """Remove a changed checkpoint from the list, or record the identities of its new files."""
        path, known = checkpoint.path, checkpoint.manifest
        if self._backend.stat(path) is None:
            if not self._lock.is_held():
                return  # the whole store may have been moved, and may come back
            self._retire_files(checkpoint, free=known)
            self._checkpoints.remove(checkpoint)
            message = (
                f"{path}: was removed or moved away while this process trains, and does not count "
                "as one of the checkpoints that are kept"
            )
            self._unreported.append((path, message))
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
            self._shared.check_files(self._backend, path, found, self._parts.directories)
        except CheckpointError as error:
            if not self._lock.is_held():
                return
            self._retire_files(checkpoint)
            self._checkpoints.remove(checkpoint)
            self._refused.append((path, str(error)))
            self._parts.claim(path, known, *([found] if found is not None else []))
            reason = seen_from(path, str(error))
            message = (
                f"not using {path} any more, because it was changed while this process trains: "
                f"{reason}"
            )
            self._unreported.append((path, message))
        else:
            ids = ids_at(self._backend, path, found, self._parts)
            self._retire_files(checkpoint)
            checkpoint.manifest, checkpoint.known_ids = found, ids

    def _retire_files(self, checkpoint: StoredCheckpoint, *, free: Manifest | None = None) -> None:
        """Close a checkpoint's files; the newest checkpoint's files stay open until `release`."""
        slot, checkpoint.slot, checkpoint.model_leaves = checkpoint.slot, None, None
        newest = max(self._checkpoints, key=lambda c: c.manifest.generation)
        if slot is not None and checkpoint is newest:
            slot.distrust()  # the next step reads files that others may have changed
            self._old_files.append((slot, free))
        else:
            self._close(slot, free)

    def _close(self, slot: Slot | None, free: Manifest | None) -> None:
        if slot is not None:
            slot.close()
        if free is not None:
            self._parts.release(free)
