"""Opening a store: make its directory, lock it, and find what is in it.

A rename that is visible may still be only in the page cache, so the directory is synced before
anything in it is trusted. What looks like a checkpoint and is not one is left alone and reported.
"""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass

from gds import Backend, LockHeldError, StorageError
from gds._backend import Lock
from offload.errors import CheckpointError, StoreError, StoreLockedError, VolatileStoreError
from offload.manifest import MANIFEST_NAME, Manifest
from offload.reading import checkpoint_paths, read_manifest
from offload.slot import LOCK_NAME, Slot

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


@dataclass(frozen=True, slots=True)
class OpenedDirectory:
    """What was found in a store when it was opened."""

    lock: Lock
    checkpoints: list[StoredCheckpoint]
    """Usable ones, oldest generation first."""

    refused: list[tuple[str, str]]
    """Paths of those that are not usable, and why."""

    leftover: list[str]
    """Paths of slots that are not checkpoints: of an earlier process, free to be rewritten."""


def open_directory(backend: Backend, directory: str, *, allow_volatile: bool) -> OpenedDirectory:
    """Open a store for writing.

    Args:
        backend: Where it is.
        directory: Absolute path; created, with its parents, if missing.
        allow_volatile: Accept a file system that forgets at power-off.

    Raises:
        StoreLockedError: Someone else is writing to it.
        VolatileStoreError: It would not survive a power-off.
        StoreError: It cannot be created, read or written.
    """
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
        lock = backend.lock(f"{directory}/{LOCK_NAME}", create=True)
    except LockHeldError as error:
        raise StoreLockedError(
            error.errno,
            "another process (or another optimizer in this one) is writing to this store; close "
            "it first, or use another directory",
            directory,
        ) from error
    except StorageError as error:
        raise StoreError(
            error.errno,
            f"cannot keep a store here ({error.strerror}); choose a directory that you can create "
            "files in",
            directory,
        ) from error
    try:
        backend.sync_dir(directory)
        checkpoints, refused = [], []
        for path in checkpoint_paths(backend, directory):
            try:
                manifest = read_manifest(backend, path)
            except (CheckpointError, StorageError) as error:
                refused.append((path, str(error)))
            else:
                backend.sync_dir(path)  # a train state may just have been replaced in it
                checkpoints.append(StoredCheckpoint(path, manifest, None))
        leftover = [n for n in backend.list_dir(directory) if _SLOT.fullmatch(n)]
    except BaseException:
        lock.release()
        raise
    checkpoints.sort(key=lambda checkpoint: checkpoint.manifest.generation)
    return OpenedDirectory(lock, checkpoints, refused, [f"{directory}/{n}" for n in leftover])


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
