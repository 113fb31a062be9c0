"""Whether a store's drives have room for what it will need."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass

from gds import Backend, StorageError
from offload.errors import SlotFullError, StoreFullError
from offload.keeping import Keeping
from offload.opening import StoredCheckpoint


@dataclass(frozen=True, slots=True)
class Room:
    """What there is, and what is wanted, in one of a store's directories."""

    backend: Backend
    directory: str

    num_free: int
    """Slots, or parts of them, that may be rewritten."""

    slot_bytes: int
    """What one of them takes."""


def require_room(
    rooms: Sequence[Room], keeping: Keeping, checkpoints: Sequence[StoredCheckpoint]
) -> None:
    """Check that all slots that retention is sure to need will fit into a store's directories.

    Policies that keep more and more are counted with what they keep now, and pins likewise.

    Args:
        rooms: The directories.
        keeping: Retention and pins of the store.
        checkpoints: Those there are.

    Raises:
        StoreFullError: They will not fit; says how much is missing.
    """
    superseded = any(c.superseded for c in checkpoints)
    num_slots = keeping.num_slots()
    for room in rooms:
        missing = max(num_slots - len(checkpoints) - room.num_free, 0)
        if superseded:
            missing = max(missing, 2 - room.num_free)
        free = room.backend.free_bytes(room.directory)
        if missing * room.slot_bytes > free:
            advice = keeping.advice()
            raise StoreFullError(
                errno.ENOSPC,
                f"keeping {keeping.describe()} needs {missing} more slots of {room.slot_bytes} "
                f"bytes each, {missing * room.slot_bytes} in all, but only {free} bytes are free; "
                "free some space, choose another directory, or pass a smaller keep="
                f"{'; or ' + advice if advice else ''}",
                room.directory,
            )


def has_room(rooms: Sequence[Room]) -> bool:
    """Return whether there is space for one slot more in each of a store's directories.

    Free slots of the first directory do not help: readers hold them. Free parts are taken.
    """
    return all(
        (drive and room.num_free) or room.backend.free_bytes(room.directory) >= room.slot_bytes
        for drive, room in enumerate(rooms)
    )


def no_room(error: StorageError, rooms: Sequence[Room], keeping: Keeping) -> SlotFullError:
    """Return what to tell a user of whom a step needs a slot that there is no space for.

    Args:
        error: Of the attempt to make it; what had been made is removed.
        rooms: The directories.
        keeping: Retention and pins of the store.
    """
    needs = "; ".join(
        f"{room.slot_bytes} bytes are needed in {room.directory} and "
        f"{room.backend.free_bytes(room.directory)} are free"
        for room in rooms
    )
    advice = keeping.advice()
    return SlotFullError(
        error.errno or errno.ENOSPC,
        f"no room for the slot that the next step writes to ({error.strerror}): {needs}. The store "
        f"keeps {keeping.describe()}. Nothing has been changed. Free some space"
        f"{' (' + advice + ')' if advice else ''}, and call again; what retention keeps is given "
        f"up by `offload prune {rooms[0].directory}` once this process has ended",
        error.filename,
    )
