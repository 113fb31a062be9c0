"""Disk space: whether drives have room for the slots that a store, or another cut, will need."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gds import Backend, StorageError
from offload.checkpoint.owner_parts import owner_directories, part_names
from offload.checkpoint.reading import read_part
from offload.errors import CheckpointError, SlotFullError, StoreFullError
from offload.format.unreadable import as_unreadable
from offload.store.claims import NamedParts, unnamed_parts
from offload.store.expiry import Keeping
from offload.store.opening import StoredCheckpoint
from offload.store.slots.folder import directories_in, files_in
from offload.store.store_errors import NOTHING_CHANGED
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


def file_bytes(backend: Backend, *folders: str) -> int:
    """Return the size in bytes of all files in some folders, which may be missing."""
    paths = (
        f"{folder}/{name}"
        for folder in folders
        if backend.stat(folder) is not None
        for name in files_in(backend, folder)
    )
    stats = (backend.stat(path) for path in paths)
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


def available_bytes(
    backend: Backend, directory: str, store_id: str, named: NamedParts, others: Iterable[str]
) -> int:
    """Return the bytes that the next slot may take on the drive of a store's directory.

    They are the free space, and that of what nobody needs any more: parts that are not `named` by a
    checkpoint that stays, and the slots and checkpoints at the paths `others`.
    """
    with as_unreadable(NOTHING_CHANGED):
        paths = {*others, *unsealed_parts(backend, directory)}
        for path in owner_directories(backend, directory).values():
            paths |= {*unnamed_parts(backend, path, store_id, named)}
        return backend.free_bytes(directory) + file_bytes(backend, *paths)


def unsealed_parts(backend: Backend, directory: str) -> list[str]:
    """Return the parts of a store of one process that belong to no checkpoint."""
    found = []
    for name in part_names(backend, directory):
        path = f"{directory}/{name}"
        if directories_in(backend, path):
            continue  # this library makes no directory in a part, so a user has made it
        try:
            read_part(backend, path)
        except CheckpointError:
            found.append(path)
    return found


def require_on_drives(rooms: Iterable[tuple[str, int, int, int]]) -> None:
    """Check that drives have room for the first slot of another cut, of one process."""
    on_drive: dict[int | str, list[tuple[str, int, int, int]]] = {}
    for room in rooms:
        try:
            drive: int | str = os.stat(room[0]).st_dev
        except OSError:  # the backend has directories of its own
            drive = ""
        on_drive.setdefault(drive, []).append(room)
    for found in on_drive.values():
        needed = sum(needed_bytes for _, needed_bytes, _, _ in found)
        available = min(free for _, _, free, _ in found) + sum(spare for *_, spare in found)
        require_available(found[0][0], needed, available)


def require_available(directory: str, needed_bytes: int, available: int) -> None:
    """Check that a drive has room for the first slot of another cut and the parts of ranks."""
    if needed_bytes > available:
        raise StoreFullError(
            errno.ENOSPC,
            "to go on with another number of ranks, or another sharding, the first step writes a "
            f"new slot of {size(needed_bytes)} beside the present checkpoints, and there is room "
            f"for {size(available)}. Nothing has been changed: make room, or resume as before",
            directory,
        )
