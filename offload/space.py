"""Whether a store's drives have room for what it will need."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gds import Backend, StorageError
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


@contextmanager
def saying_what_is_free(
    backend: Backend, path: str, needed_bytes: int, what: str
) -> Iterator[None]:
    """Say, where the block finds no space for something, how much it needs and how much is free.

    Args:
        backend: Where.
        path: What is being made.
        needed_bytes: All that it takes.
        what: What it is, for people.

    Raises:
        gds.StorageError: The block's; ENOSPC with both numbers.
    """
    try:
        yield
    except StorageError as error:
        if error.errno != errno.ENOSPC:
            raise
        try:
            free = backend.free_bytes(os.path.dirname(path))
        except StorageError:
            raise error from None  # it says more than that the rest cannot be told
        raise StorageError(
            errno.ENOSPC, f"reserve {needed_bytes} bytes for {what}, with {free} bytes free", path
        ) from error
