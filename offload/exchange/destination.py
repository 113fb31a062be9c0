"""Destination of an export, which gets its name once it is complete, or is removed.

What obviously cannot be written fails before anything is read. torch's own writers report a full
disk without an error number; here such reports name the path and the next thing to do.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from gds import Backend, StorageError
from offload.errors import OffloadError, StoreError, StoreFullError
from offload.store.store_errors import FULL
from offload.units import size

_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)
"""Error numbers that mean that this user cannot make a file in a directory."""

_TORCH_WRITER_WORDS = ("inline_container", "iostream error", "PytorchStreamWriter")
"""Words that mark a `RuntimeError` as raised by torch's file writer."""

_LEFT_NOTHING = "No partial file is left"


@contextmanager
def atomic_output(backend: Backend, target: str, needed_bytes: int) -> Iterator[str]:
    """Yield a temporary path to write to; rename it to the target at the end.

    The rename is durable when the block ends; the caller syncs the content of files. If the block
    fails, everything at the temporary path is removed.
    """
    directory = os.path.dirname(target)
    if backend.stat(directory) is None:
        raise StoreError(
            errno.ENOENT, "the parent directory of the export does not exist; create it", directory
        )
    partial = f"{target}.partial"
    for path in (target, partial):
        if _exists(backend, path):
            raise StoreError(
                errno.EEXIST,
                "it already exists; remove it, or export elsewhere",
                path,
            )
    try:
        _require_writable(backend, partial, needed_bytes)
        yield partial
        stat = backend.stat(partial)
        if stat is not None and stat.kind == "directory":
            backend.sync_dir(partial)
        backend.rename(partial, target)
        backend.sync_dir(directory)
    except BaseException as error:
        # If the removal fails, too, the first error says more. The next export names the leftover.
        with suppress(StorageError):
            _remove(backend, partial)
        if isinstance(error, StorageError) and not isinstance(error, StoreError):
            explained = _explained(backend, error, target, needed_bytes)
            if explained is not None:
                raise explained from error
        raise


@contextmanager
def torch_writing(path: str, needed_bytes: int = 0) -> Iterator[None]:
    """Convert torch's errors of writing into errors with the path and an error number."""
    try:
        yield
    except (StorageError, OffloadError):
        raise
    except OSError as error:
        raise StorageError(error.errno or errno.EIO, "write", path) from error
    except RuntimeError as error:
        message = str(error)
        if not any(word in message for word in _TORCH_WRITER_WORDS):
            raise
        raise StorageError(_errno_of(message, path, needed_bytes), "write", path) from error


def _errno_of(message: str, path: str, needed_bytes: int) -> int:
    """Return the error number for a message of torch, which may not name the cause.

    For a message without a cause this is ENOSPC if the space left is too small, and EIO otherwise.
    """
    for number in (*_FORBIDDEN, *FULL, errno.EIO):
        if os.strerror(number) in message:
            return number
    space = os.statvfs(os.path.dirname(path))
    is_full = space.f_bavail * space.f_frsize < max(needed_bytes - _disk_usage(path), 1)
    return errno.ENOSPC if is_full else errno.EIO


def _disk_usage(path: str) -> int:
    """Return the disk space that a file, or the files of a directory, occupy, in bytes."""
    files = [path]
    if os.path.isdir(path):
        files = [entry.path for entry in os.scandir(path)]
    return sum(os.stat(file).st_blocks * 512 for file in files if os.path.exists(file))


def _require_writable(backend: Backend, partial: str, needed_bytes: int) -> None:
    """Raise `StorageError` if a file cannot be made at a path, or its disk has too little space."""
    backend.create(partial, 0).close()
    backend.remove(partial)
    if backend.free_bytes(os.path.dirname(partial)) < needed_bytes:
        raise StorageError(errno.ENOSPC, f"reserve {needed_bytes} bytes", partial)


def _explained(
    backend: Backend, error: StorageError, target: str, needed_bytes: int
) -> StoreError | None:
    """Return the error to raise for a failed write of the export.

    The result is None if the error concerns another path (such as one that is read), or has a cause
    that this module does not explain.
    """
    directory = os.path.dirname(target)
    where = os.fsdecode(error.filename or "")
    if where != directory and not where.startswith(f"{target}.partial"):
        return None
    if error.errno in _FORBIDDEN:
        return StoreError(
            error.errno,
            f"cannot be written ({os.strerror(error.errno)}): check its permissions (ls -ld), or "
            f"export elsewhere. {_LEFT_NOTHING}",
            directory,
        )
    if error.errno in FULL:
        free = size(backend.free_bytes(directory))
        return StoreFullError(
            error.errno,
            f"the export needs at least {size(needed_bytes)}, but only {free} are free: free some "
            f"space, or export elsewhere. {_LEFT_NOTHING}",
            target,
        )
    return None


def _exists(backend: Backend, path: str) -> bool:
    try:
        return backend.stat(path) is not None
    except StorageError as error:
        if error.errno in _FORBIDDEN:
            return False  # the target cannot be made either, and the next call reports that
        raise


def _remove(backend: Backend, path: str) -> None:
    stat = backend.stat(path)
    if stat is None:
        return
    if stat.kind != "directory":
        backend.remove(path)
        return
    for name in backend.list_dir(path):
        backend.remove(f"{path}/{name}")
    backend.remove_dir(path)
