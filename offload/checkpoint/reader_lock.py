"""Shared locks of readers: they keep a checkpoint from being recycled.

A training process takes an exclusive lock before it recycles a checkpoint. It then renames the
directory, and only after that overwrites anything. A reader takes a shared lock on the directory,
and then checks that the directory still has its name. If so, the reader reads what was sealed. A
reader without a lock that finds a fault looks at the name again. If the name is gone, or belongs to
another checkpoint, the checkpoint was recycled and is not damaged.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from contextlib import contextmanager

from gds import Backend, LockHeldError, StorageError
from gds.contract import Lock
from offload.checkpoint.reading import decode_manifest
from offload.errors import CheckpointError, RecycledError, StoreBusyError
from offload.format.manifest import Manifest

_BUSY_S = 1.0
"""Longest wait for a writer to release its lock, in seconds. A writer that finds a pin under the
lock releases it at once."""

_POLL_S = 0.01


def lock_for_reading(backend: Backend, path: str) -> Lock:
    """Take a shared lock on a checkpoint's directory. The caller must release it."""
    deadline = time.monotonic() + _BUSY_S
    while True:
        before = backend.stat(path)
        if before is None:
            raise recycled(path)
        try:
            lock = backend.lock(path, shared=True)
        except LockHeldError as error:
            if time.monotonic() < deadline:
                time.sleep(_POLL_S)
                continue
            raise StoreBusyError(
                error.errno, "this checkpoint is being recycled; open a newer one", path
            ) from error
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise
            raise recycled(path) from error
        # The lock is on the directory that had the name at that moment. Check that it still has it.
        after = backend.stat(path)
        if after is None or after.inode != before.inode:
            lock.release()
            raise recycled(path)
        return lock


@contextmanager
def held(backend: Backend, path: str, manifest: Manifest, lock: Lock | None) -> Iterator[None]:
    """Keep a checkpoint from being recycled within the block.

    Args:
        backend: Storage backend of the checkpoint.
        path: Directory of the checkpoint.
        manifest: Manifest of the checkpoint.
        lock: Lock that the caller holds already; None to take a lock for the block.

    Raises:
        RecycledError: The checkpoint was recycled before the block.
        StoreBusyError: A writer holds a lock on the checkpoint.
        gds.StorageError: The checkpoint cannot be locked.
    """
    if lock is not None:
        yield
        return
    lock = lock_for_reading(backend, path)
    try:
        if was_recycled(backend, path, manifest):
            raise recycled(path)
        yield
    finally:
        lock.release()


def was_recycled(backend: Backend, path: str, manifest: Manifest) -> bool:
    """Return whether a path belongs to another checkpoint now, or no longer exists.

    A checkpoint that has given up its state since then counts as recycled, too.

    If the manifest cannot be read, the checkpoint counts as the same: its fault is damage.
    """
    if backend.stat(path) is None:
        return True
    try:
        found = decode_manifest(backend, path)
    except (CheckpointError, StorageError):
        return backend.stat(path) is None
    return _identity(found) != _identity(manifest)


def _identity(manifest: Manifest) -> tuple[str, int, bool]:
    return manifest.store_id, manifest.generation, manifest.has_state


def recycled(path: str) -> RecycledError:
    """Return the error for a checkpoint that a training process has recycled."""
    return RecycledError(
        errno.EAGAIN, "this checkpoint has just been recycled; open a newer one", path
    )
