"""The free slots of a store: no checkpoint and no step uses them, so they may be rewritten."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import suppress

from offload.checkpoint.reading import decode_manifest
from offload.errors import CheckpointError
from offload.format.layout import Layout
from offload.format.names import slot_name
from offload.store.opening import StoreContent
from offload.store.slots.folder import directories_in, locked, remove_folder
from offload.store.slots.slot import Slot, SlotState, adopt_slot, create_slot
from offload.store.store_errors import naming_free_space

_NOT_READY = "a free slot could not be made ready"


class FreeSlots:
    """Free slots: open slots of this process, and directories left by earlier processes.

    Not thread-safe: the store holds its own lock around every call.

    An open slot has parts of its own on further drives; a directory gets parts when it is opened.
    """

    def __init__(self, opened: StoreContent) -> None:
        self._backend = opened.backend
        self._directory = opened.directory
        self._parts = opened.parts
        self._poison = opened.poison
        self._slots: list[Slot | str] = [*opened.leftover]

    def __len__(self) -> int:
        return len(self._slots)

    def paths(self) -> list[str]:
        """Return the paths of the free slots."""
        return [slot.path if isinstance(slot, Slot) else slot for slot in self._slots]

    def note_withdrawn(self) -> None:
        """Find slots whose withdrawal was not finished, and record that their parts are free."""
        for path in self.paths() if self._parts.directories else ():
            with suppress(CheckpointError):  # a finished withdrawal leaves no valid manifest
                self._parts.note_withdrawn(decode_manifest(self._backend, path))

    def add(self, slot: Slot | str) -> None:
        """Add a slot that nobody needs any more, given as an open slot or by its path.

        Adding a slot again has no effect, because a caller that was interrupted while it released
        the slot may release it again. A slot listed twice could be lent to two callers, and one of
        them would write into the checkpoint of the other.
        """
        if slot not in self._slots:
            self._slots.append(slot)

    def take(self, layout: Layout, sizes: Mapping[str, int]) -> Slot | None:
        """Return a free slot with the given layout, or None; slots that do not fit are removed.

        Slots that a reader still holds are skipped. A storage error says that a slot or its parts
        could not be made ready, for example because another drive has no space.
        """
        for candidate in reversed(self._slots):
            if isinstance(candidate, Slot):
                in_place = candidate.is_in_place()
                self._slots.remove(candidate)
                is_alike = candidate.layout == layout and candidate.layout.shard == layout.shard
                if is_alike and candidate.sizes == sizes and in_place:
                    return candidate
                with self._poison.fatal(_NOT_READY):
                    self.discard(candidate)
                continue
            if self._delist_if_not_a_slot(candidate):
                continue
            with locked(self._backend, candidate) as is_locked:
                if not is_locked:
                    continue  # a reader still holds the former checkpoint
                parts = self._parts.take(layout)
                self._slots.remove(candidate)
                adopted = None
                try:
                    with self._poison.fatal(_NOT_READY):
                        adopted = adopt_slot(self._backend, candidate, layout, sizes)
                        if adopted is None:
                            remove_folder(self._backend, candidate)
                finally:
                    if adopted is None:
                        self._parts.put_back(parts)
                if adopted is not None:
                    adopted.add_parts(parts)
                    return adopted
        return None

    def create(self, layout: Layout, sizes: Mapping[str, int]) -> Slot:
        """Create a slot with parts on the further drives.

        If that fails, for example for lack of space, its files and parts are removed.
        """
        parts = self._parts.take(layout)
        try:
            path = self.unused_path()
            with naming_free_space(self._backend, path, sum(sizes.values()), "a slot"):
                slot = create_slot(self._backend, path, layout, sizes)
        except BaseException:
            self._parts.remove(parts)
            raise
        slot.add_parts(parts)
        return slot

    def unused_path(self) -> str:
        """Return a path in the store that a new slot can have."""
        taken = set(self._backend.list_dir(self._directory))
        k = 1
        while slot_name(k) in taken:
            k += 1
        return f"{self._directory}/{slot_name(k)}"

    def drop(self, num: int) -> None:
        """Remove up to `num` free slots from the drive, the oldest first.

        Slots that a reader still holds are left. Slots that somebody has removed by hand count as
        removed.
        """
        for spare in self._slots[: max(num, 0)]:
            if isinstance(spare, Slot):
                self._slots.remove(spare)
                self.discard(spare)
                continue
            if self._delist_if_not_a_slot(spare):
                continue
            with locked(self._backend, spare) as is_locked:
                if is_locked:  # otherwise a reader still holds the former checkpoint
                    self._slots.remove(spare)
                    remove_folder(self._backend, spare)

    def discard(self, slot: Slot) -> None:
        """Close a slot and remove it, unless it may be a checkpoint (`SlotState.IN_DOUBT`).

        A slot that may be a checkpoint stays, and a later process finds out whether it is one. If
        other files are at the slot's path, they are left alone. Either a user has put them at this
        path, or a user has removed the slot and another slot has its name now.
        """
        at_path = slot.folder.is_in_place()
        slot.close()
        if not at_path:
            self._parts.put_back(slot.parts)
            return
        if slot.state is not SlotState.IN_DOUBT:
            remove_folder(self._backend, slot.path)
            self._parts.remove(slot.parts)

    def close(self) -> None:
        """Close the slots that are open."""
        for slot in self._slots:
            if isinstance(slot, Slot):
                slot.close()

    def _delist_if_not_a_slot(self, path: str) -> bool:
        """Remove a path from the list at which no slot can be: because of what is there, or is not.

        If somebody has removed the slot by hand, nothing is said. If something else is at the path,
        a warning says so, and it is left alone, so that a person can look at it.
        """
        stat = self._backend.stat(path)
        if stat is None:
            self._slots.remove(path)
            return True
        inside = directories_in(self._backend, path) if stat.kind == "directory" else []
        if stat.kind == "directory" and not inside:
            return False
        self._slots.remove(path)
        what = (
            f"it holds the directory {inside[0]!r}, which is not of this library. Move that away"
            if inside
            else "it is not a directory, so it cannot be a slot. Remove it"
        )
        warnings.warn(
            f"{path}: not used, and left alone: {what}",
            RuntimeWarning,
            stacklevel=3,
        )
        return True
