"""Opening a store: make its directories, lock them, and find what is in them.

A rename that is visible may still be only in the page cache, so the first directory, whose names
decide, is synced before anything in it is trusted. What looks like a checkpoint and is not one is
left alone and reported.
"""

from __future__ import annotations

import errno
import os
import re
import uuid
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from gds import Backend, LockHeldError, StorageError
from gds._backend import Lock
from offload.digests import DigestContext
from offload.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    StoreError,
    StoreFullError,
    StoreLockedError,
    VolatileStoreError,
)
from offload.identity import read_store_id
from offload.known_leaves import KnownLeaves
from offload.manifest import MANIFEST_NAME, Manifest
from offload.part_pool import PartPool, part_numbers
from offload.poison import Poison
from offload.reading import (
    check_files,
    check_name,
    checkpoint_paths,
    decode_manifest,
    kind_of,
)
from offload.slot import LOCK_NAME, Slot, open_slot

_SLOT = re.compile(r"\.slot-\d+")


@dataclass(slots=True, eq=False)
class StoredCheckpoint:
    """A sealed slot of a store, as its writer sees it."""

    path: str
    manifest: Manifest
    slot: Slot | None
    """Its open files, where this process has them open."""

    superseded: bool = False
    """Whether it belongs to a history that `fresh=True` has given up."""

    model_leaves: KnownLeaves | None = None
    """What was known of its model file when its files were last closed."""

    def close(self) -> None:
        """Close its files, where they are open, and keep what is known of them. Idempotent."""
        if self.slot is not None:
            self.model_leaves = self.slot.model_leaves
            self.slot.close()
            self.slot = None


@dataclass(frozen=True, slots=True)
class OpenedDirectory:
    """What was found in a store when it was opened."""

    locks: list[Lock]
    """One for each directory."""

    store_id: str

    is_identified: bool
    """Whether a new process would find the same `store_id`, if there were no checkpoint."""

    parts: PartPool
    """What there is on drives other than the first."""

    checkpoints: list[StoredCheckpoint]
    """Usable ones, oldest generation first."""

    refused: list[tuple[str, str]]
    """Paths of those that are not usable, and why."""

    leftover: list[str]
    """Paths of slots that are not checkpoints: of an earlier process, free to be rewritten."""


def open_directories(
    drives: Sequence[tuple[Backend, str]], poison: Poison, *, allow_volatile: bool
) -> OpenedDirectory:
    """Open a store for writing.

    Args:
        drives: Backend and absolute path of each directory; created, with parents, if missing.
        poison: Of the store.
        allow_volatile: Accept a file system that forgets at power-off.

    Raises:
        StoreLockedError: Someone else is writing to one of them.
        VolatileStoreError: One would not survive a power-off.
        StoreError: One cannot be created, read or written, or the store has another number of
            directories.
    """
    locks: list[Lock] = []
    try:
        for backend, directory in drives:
            locks.append(_lock_directory(backend, directory, allow_volatile=allow_volatile))
        # Names in the others are made durable when a part is sealed; until then none is trusted.
        drives[0][0].sync_dir(drives[0][1])
        return _look_around(drives, locks, poison)
    except BaseException:
        for lock in locks:
            lock.release()
        raise


def find_stored(
    checkpoints: Sequence[StoredCheckpoint], which: int | str, directory: str
) -> StoredCheckpoint:
    """Return the checkpoint of a store with a step number, or with a path or directory name.

    Raises:
        CheckpointNotFoundError: There is none; names those there are.
    """
    usable = [c for c in checkpoints if not c.superseded]
    for checkpoint in usable:
        if isinstance(which, int):
            if checkpoint.manifest.step == which:
                return checkpoint
        elif os.path.abspath(which) == checkpoint.path or (
            which == os.path.basename(checkpoint.path)
        ):
            return checkpoint
    names = ", ".join(os.path.basename(c.path) for c in usable) or "none"
    raise CheckpointNotFoundError(
        errno.ENOENT,
        f"no usable checkpoint {which!r} in this store (it has: {names})",
        directory,
    )


def open_stored(
    backend: Backend, checkpoint: StoredCheckpoint, parts: PartPool, *, writable: bool
) -> Slot:
    """Open a checkpoint's files, if they are not open already, and keep them open.

    What this process sealed is open for writing; what it restored from, for reading only.
    """
    if checkpoint.slot is not None and (checkpoint.slot.writable or not writable):
        return checkpoint.slot
    checkpoint.close()
    manifest = checkpoint.manifest
    slot = open_slot(backend, checkpoint.path, manifest.layout, writable=writable)
    try:
        slot.parts = parts.open(manifest, writable=writable)
    except BaseException:
        slot.close()
        raise
    slot.begin_generation(DigestContext(manifest.store_id, manifest.generation))
    slot.unchecked = True
    slot.digests = {name: list(digests) for name, digests in manifest.digests.items()}
    known = checkpoint.model_leaves
    if known is not None and known.inode == slot.model_leaves.inode != 0:
        slot.model_leaves = known
    checkpoint.slot = slot
    return slot


def _lock_directory(backend: Backend, directory: str, *, allow_volatile: bool) -> Lock:
    try:
        if backend.stat(f"{directory}/{MANIFEST_NAME}") is not None:
            raise StoreError(
                errno.EINVAL,
                "this is a checkpoint, not a store: pass the directory that it is in, "
                f"{os.path.dirname(directory)!r}, and name the checkpoint to restore()",
                directory,
            )
        made = _make_directory(backend, directory)
        capabilities = backend.capabilities(directory)
        if capabilities.volatile and not allow_volatile:
            for path in reversed(made):
                backend.remove_dir(path)
            raise VolatileStoreError(
                errno.EINVAL,
                f"the file system ({capabilities.filesystem}) loses its content at power-off, so "
                "checkpoints there would not survive; choose a directory on a drive, or pass "
                "options=Options(allow_volatile=True) if that is what you want",
                directory,
            )
        return backend.lock(f"{directory}/{LOCK_NAME}", create=True)
    except LockHeldError as error:
        raise StoreLockedError(
            error.errno,
            "another process (or another optimizer in this one) is writing to this store; close "
            "it first, or use another directory",
            directory,
        ) from error
    except StorageError as error:
        if error.errno == errno.ENOSPC:
            raise StoreFullError(
                error.errno,
                f"there is no space, not even for an empty store ({error.strerror}): "
                f"{_free_bytes(backend, directory)} bytes are free; free some, or choose another "
                "directory",
                directory,
            ) from error
        raise StoreError(
            error.errno,
            f"cannot keep a store here ({error.strerror}); choose a directory that you can create "
            "files in",
            directory,
        ) from error


def _free_bytes(backend: Backend, directory: str) -> int:
    while backend.stat(directory) is None:
        directory = os.path.dirname(directory)
    return backend.free_bytes(directory)


def _look_around(
    drives: Sequence[tuple[Backend, str]], locks: list[Lock], poison: Poison
) -> OpenedDirectory:
    (backend, directory), *others = drives
    other_directories = [path for _, path in others]
    checkpoints, refused = [], []
    claims: dict[str, frozenset[int] | None] = {}
    for path in checkpoint_paths(backend, directory):
        claims[path] = None
        try:
            manifest = decode_manifest(backend, path)
            check_name(path, manifest)
            claims[path] = part_numbers(manifest)
            _check_number_of_directories(path, manifest, drives)
            check_files(backend, path, manifest, other_directories)
        except (CheckpointError, StorageError) as error:
            refused.append((path, str(error)))
        else:
            backend.sync_dir(path)  # a train state may just have been replaced in it
            checkpoints.append(StoredCheckpoint(path, manifest, None))
            del claims[path]
    checkpoints.sort(key=lambda checkpoint: checkpoint.manifest.generation)
    recorded = read_store_id(backend, directory) if others else None
    store_id = checkpoints[-1].manifest.store_id if checkpoints else recorded or uuid.uuid4().hex
    parts = PartPool(others, store_id, [c.manifest for c in checkpoints], claims, poison)
    if foreign := parts.foreign():
        warnings.warn(
            f"{', '.join(foreign)}: sealed for another store, and left alone. If that store is "
            "gone, remove them: they take space",
            RuntimeWarning,
            stacklevel=2,
        )
    leftover = _leftover_slots(backend, directory)
    return OpenedDirectory(
        locks=locks,
        store_id=store_id,
        is_identified=recorded == store_id or not others,
        parts=parts,
        checkpoints=checkpoints,
        refused=refused,
        leftover=leftover,
    )


def _leftover_slots(backend: Backend, directory: str) -> list[str]:
    """Return the slots that may be rewritten; what only has such a name is left alone."""
    found = []
    for path in (f"{directory}/{n}" for n in backend.list_dir(directory) if _SLOT.fullmatch(n)):
        stat = backend.stat(path)
        if stat is not None and stat.kind == "directory":
            found.append(path)
        elif stat is not None:
            warnings.warn(
                f"{path}: {kind_of(stat)}, expected a directory: not used, and left alone. Remove "
                "it",
                RuntimeWarning,
                stacklevel=2,
            )
    return found


def _check_number_of_directories(
    path: str, manifest: Manifest, drives: Sequence[tuple[Backend, str]]
) -> None:
    if len(manifest.layout.shares) == len(drives):
        return
    first = os.path.dirname(path)
    sealed = [first, *(part.directory for part in manifest.parts)]
    raise StoreError(
        errno.EINVAL,
        f"{os.path.basename(path)} of this store is spread over {len(sealed)} directories, and "
        f"{len(drives)} were given: pass directory={sealed!r}, or where they are now, in this "
        "order. To begin anew with other directories, let another one be the first",
        first,
    )


def _make_directory(backend: Backend, directory: str) -> list[str]:
    """Make a directory and its parents, durably; returns those that were missing, from the top."""
    missing: list[str] = []
    path = directory
    while (stat := backend.stat(path)) is None:
        missing.insert(0, path)
        path = os.path.dirname(path)
    if stat.kind == "file":
        raise StorageError(errno.ENOTDIR, "making the store's directory", path)
    try:
        # A process that made it may have died before it could sync the name.
        backend.sync_dir(os.path.dirname(path))
    except StorageError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EINVAL):
            raise
    for new in missing:
        backend.make_dir(new)
        backend.sync_dir(os.path.dirname(new))
    return missing
