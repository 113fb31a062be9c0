"""How a reader keeps a checkpoint from being recycled, and notices that it came too late.

A training process takes an exclusive lock before it recycles a checkpoint, renames the directory
away, and only then overwrites anything. So whoever has a shared lock on a directory, and finds the
directory under its name after that, reads what was sealed. Whoever reads without a lock and finds
something wrong looks at the name again: if it is gone, or names another directory, the checkpoint
was recycled, and nothing is wrong with it.
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
"""How long a writer's lock is waited for: it may only have looked whether there is a pin."""

_POLL_S = 0.01


def lock_for_reading(backend: Backend, path: str) -> Lock:
    """Take a shared lock on a checkpoint's directory.

    Raises:
        RecycledError: It has been recycled: it is gone, or another one has its name.
        StoreBusyError: A writer has held it for a second, to recycle or to replace it.
        gds.StorageError: It cannot be locked.
    """
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
        # The lock is on whatever had the name then; make sure that still has it now.
        after = backend.stat(path)
        if after is None or after.inode != before.inode:
            lock.release()
            raise recycled(path)
        return lock


@contextmanager
def held(backend: Backend, path: str, manifest: Manifest, lock: Lock | None) -> Iterator[None]:
    """Keep a checkpoint from being recycled within the block.

    Args:
        backend: Where it is.
        path: Its directory.
        manifest: What it is.
        lock: One that is held already; None to take one for the block.

    Raises:
        RecycledError: It has been recycled before.
        StoreBusyError: A writer holds it.
        gds.StorageError: It cannot be locked.
    """
    if lock is not None:
        yield
        return
    lock = lock_for_reading(backend, path)
    try:
        if is_another(backend, path, manifest):
            raise recycled(path)
        yield
    finally:
        lock.release()


def is_another(backend: Backend, path: str, manifest: Manifest) -> bool:
    """Return whether a path is that of another checkpoint by now, or of none.

    One whose manifest cannot be read counts as the same: what is wrong with it is damage.
    """
    if backend.stat(path) is None:
        return True
    try:
        found = decode_manifest(backend, path)
    except (CheckpointError, StorageError):
        return backend.stat(path) is None
    return (found.store_id, found.generation) != (manifest.store_id, manifest.generation)


def recycled(path: str) -> RecycledError:
    """Return the error for a checkpoint that a training process has recycled."""
    return RecycledError(
        errno.EAGAIN, "this checkpoint has just been recycled; open a newer one", path
    )
