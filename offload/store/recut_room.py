"""Room for the first slot of another cut, beside the checkpoints of the cut before."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterable
from contextlib import suppress

from gds import Backend, StorageError
from offload.checkpoint.owner_parts import owner_directories, part_names
from offload.checkpoint.reading import read_part
from offload.errors import CheckpointError, OffloadError, StoreFullError
from offload.format.unreadable import as_unreadable
from offload.store.owners.claims import NamedParts
from offload.store.owners.free_parts import unnamed_parts
from offload.store.owners.store import remove_unnamed_parts
from offload.store.slots.folder import directories_in, files_in
from offload.store.store_errors import NOTHING_CHANGED
from offload.units import size


def available_bytes(
    backend: Backend, directory: str, store_id: str, named: NamedParts, others: Iterable[str]
) -> int:
    """Return the bytes that the next slot may take on the drive of a store's directory.

    They are the free space, and that of slots and parts which nobody needs any more.

    Args:
        backend: Backend of the directory.
        directory: Directory of the store.
        store_id: Identity of the store.
        named: Parts that any checkpoint that stays names.
        others: Paths of slots and checkpoints that nobody needs any more.

    Raises:
        UnreadableError: The drive could not be examined.
    """
    with as_unreadable(NOTHING_CHANGED):
        paths = {*others, *unsealed_parts(backend, directory)}
        for path in owner_directories(backend, directory).values():
            paths |= {*unnamed_parts(backend, path, store_id, named)}
        return backend.free_bytes(directory) + sum(_bytes_of(backend, path) for path in paths)


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
    """Check that a drive has room for the first slot of another cut.

    Args:
        directory: The store's first directory.
        needed_bytes: Bytes of the slot, with the parts of all ranks.
        available: What `available_bytes` has returned.

    Raises:
        StoreFullError: There is no room. Nothing has been changed.
    """
    if needed_bytes > available:
        raise StoreFullError(
            errno.ENOSPC,
            "to go on with another number of ranks, or another sharding, the first step writes a "
            f"new slot of {size(needed_bytes)} beside the present checkpoints, and there is room "
            f"for {size(available)}. Nothing has been changed: make room, or resume as before",
            directory,
        )


def remove_parts_of_former_owners(
    backend: Backend,
    directory: str,
    store_id: str,
    named: NamedParts,
    served: Collection[int] = (),
) -> None:
    """Remove the parts of owners that no rank serves any more, and that no checkpoint names.

    Parts that cannot be removed now stay; the next call tries it again.

    Args:
        backend: Backend of the directory.
        directory: The store's first directory.
        store_id: Identity of the store.
        named: Parts that any checkpoint of the store names at this moment.
        served: Numbers of the owners that ranks serve.
    """
    with suppress(StorageError, OffloadError):
        former = {*owner_directories(backend, directory)} - {*served}
        if former:
            remove_unnamed_parts(backend, directory, store_id=store_id, named=named, served=served)


def _bytes_of(backend: Backend, path: str) -> int:
    """Return the size in bytes of the files in a directory."""
    stats = [backend.stat(f"{path}/{name}") for name in files_in(backend, path)]
    return sum(stat.size_bytes for stat in stats if stat is not None and stat.kind == "file")
