"""Disk space: whether a store's drives have room for the slots that it will need."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass

from gds import Backend, StorageError
from offload.errors import SlotFullError, StoreFullError
from offload.store.expiry import Keeping
from offload.store.opening import StoredCheckpoint
from offload.units import many, size


@dataclass(frozen=True, slots=True)
class Room:
    """Present and needed space in one directory of a store."""

    backend: Backend
    directory: str

    num_free: int
    """Number of slots, or parts of slots, that may be rewritten."""

    slot_bytes: int
    """Size in bytes of one slot, or of one part."""


def require_room(
    rooms: Sequence[Room], keeping: Keeping, checkpoints: Sequence[StoredCheckpoint]
) -> None:
    """Check that the drives have room for all slots that retention will certainly need.

    For policies whose number of checkpoints grows with training, and for pins, only the checkpoints
    that they keep now are counted.
    """
    superseded = any(c.superseded for c in checkpoints)
    num_slots = keeping.num_slots()
    elsewhere = "move the store to a larger drive" if checkpoints else "choose another directory"
    for room in rooms:
        missing = max(num_slots - len(checkpoints) - room.num_free, 0)
        if superseded:
            missing = max(missing, 2 - room.num_free)
        free = room.backend.free_bytes(room.directory)
        if missing * room.slot_bytes > free:
            advice = keeping.advice()
            raise StoreFullError(
                errno.ENOSPC,
                f"keeping {keeping.describe()} needs {many(missing, 'more slot')} of "
                f"{size(room.slot_bytes)}, {size(missing * room.slot_bytes)} in all "
                f"({size(free)} free): make room, {elsewhere}, or pass a smaller keep="
                f"{'; or ' + advice if advice else ''}",
                room.directory,
            )


def has_room(rooms: Sequence[Room]) -> bool:
    """Return whether each directory of a store has space for one additional slot.

    Free slots of the first directory do not count, because readers hold them. Free parts on the
    other drives do count.
    """
    return all(
        (drive and room.num_free) or room.backend.free_bytes(room.directory) >= room.slot_bytes
        for drive, room in enumerate(rooms)
    )


def file_bytes(backend: Backend, directory: str) -> int:
    """Return the size in bytes of all files in a directory; 0 if it does not exist.

    Raises:
        gds.StorageError: The directory could not be examined.
    """
    if backend.stat(directory) is None:
        return 0
    stats = (backend.stat(f"{directory}/{name}") for name in backend.list_dir(directory))
    return sum(stat.size_bytes for stat in stats if stat is not None and stat.kind == "file")


def no_room(error: StorageError, rooms: Sequence[Room], keeping: Keeping) -> SlotFullError:
    """Return the error for a user if no disk space is left for the slot that a step needs."""
    free = {room.directory: room.backend.free_bytes(room.directory) for room in rooms}
    short = [r for r in rooms if free[r.directory] < r.slot_bytes] or rooms
    needs = " and ".join(
        f"{size(room.slot_bytes)}{f' in {room.directory}' if len(short) > 1 else ''} "
        f"({size(free[room.directory])} free)"
        for room in short
    )
    number = error.errno or errno.ENOSPC
    advice = keeping.room_advice([room.directory for room in rooms[1:]])
    return SlotFullError(
        number,
        f"{os.strerror(number)}: the slot that the next step writes to needs {needs}. Nothing has "
        f"been changed: free some space, and call again. The store keeps {keeping.describe()}"
        f"{'. ' + advice if advice else ''}",
        short[0].directory,
    )
