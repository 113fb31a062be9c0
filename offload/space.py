"""Whether a store's drives have room for what it will need."""

from __future__ import annotations

import errno
from dataclasses import dataclass

from gds import Backend
from offload.errors import StoreFullError


@dataclass(frozen=True, slots=True)
class Room:
    """What there is, and what is wanted, in one of a store's directories."""

    backend: Backend
    directory: str

    num_free: int
    """Slots, or parts of them, that may be rewritten."""

    slot_bytes: int
    """What one of them takes."""


def require_room(room: Room, *, keep: int, num_checkpoints: int, superseded: bool) -> None:
    """Check that all slots the retention policy can ever hold will fit into a directory.

    Args:
        room: The directory.
        keep: Checkpoints to keep.
        num_checkpoints: Those there are.
        superseded: Whether some of them stay only until the first new one is durable.

    Raises:
        StoreFullError: They will not fit; says how much is missing.
    """
    missing = max(keep + 1 - num_checkpoints - room.num_free, 0)
    if superseded:
        missing = max(missing, 2 - room.num_free)
    free = room.backend.free_bytes(room.directory)
    if missing * room.slot_bytes > free:
        raise StoreFullError(
            errno.ENOSPC,
            f"keeping {keep} checkpoints needs {missing} more slots of {room.slot_bytes} bytes "
            f"each, {missing * room.slot_bytes} in all, but only {free} bytes are free; free some "
            "space, choose another directory, or pass a smaller keep=",
            room.directory,
        )
