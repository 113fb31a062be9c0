"""Where an export goes: it appears under its name when it is whole, or leaves nothing.

What cannot be written is found before anything is read, if that can be known then. torch's own
writers report a disk that fills, or a missing permission, in words of their implementation and
without a number: here those become errors that name the path and what to do next.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from gds import Backend, StorageError
from offload.errors import OffloadError, StoreError, StoreFullError
from offload.store.full_disk import FULL
from offload.units import size

_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)
"""Numbers of the errors that say that a directory is none in which this user can make a file."""

_TORCHS = ("inline_container", "iostream error", "PytorchStreamWriter")
"""What is in the messages of a `RuntimeError` of torch's writer of files."""

_LEFT_NOTHING = "Nothing is left of it"


@contextmanager
def appearing(backend: Backend, target: str, needed_bytes: int) -> Iterator[str]:
    """Give a name to write under, renamed to the target at the end; removed after a failure.

    Args:
        backend: Where the target is to be.
        target: The absolute path of the file or directory to make.
        needed_bytes: What it will take at least.

    Raises:
        StoreFullError: There is no room for it; says how much it needs and how much is free.
        StoreError: There is something at the target already, or its directory is not there or
            cannot be written.
    """
    directory = os.path.dirname(target)
    if backend.stat(directory) is None:
        raise StoreError(errno.ENOENT, "there is no directory to export into; make it", directory)
    partial = f"{target}.partial"
    for path in (target, partial):
        if _is_there(backend, path):
            raise StoreError(
                errno.EEXIST,
                "there is something of this name; remove it, or export elsewhere",
                path,
            )
    try:
        _try_out(backend, partial, needed_bytes)
        yield partial
        stat = backend.stat(partial)
        if stat is not None and stat.kind == "directory":
            backend.sync_dir(partial)
        backend.rename(partial, target)
        backend.sync_dir(directory)
    except BaseException as error:
        with suppress(StorageError):  # the first error says more, and the next export names it
            _remove(backend, partial)
        if isinstance(error, StorageError) and not isinstance(error, OffloadError):
            named = _named(backend, error, target, needed_bytes)
            if named is not None:
                raise named from error
        raise


@contextmanager
def torch_writing(path: str, needed_bytes: int = 0) -> Iterator[None]:
    """Turn what torch raises if it cannot write into an error with the path and a number.

    Args:
        path: Of what is written: a file, or a directory.
        needed_bytes: What it takes in the end.

    Raises:
        gds.StorageError: It could not be written.
    """
    try:
        yield
    except (StorageError, OffloadError):
        raise
    except OSError as error:
        raise StorageError(error.errno or errno.EIO, "write", path) from error
    except RuntimeError as error:
        said = str(error)
        if not any(word in said for word in _TORCHS):
            raise
        raise StorageError(_number_of(said, path, needed_bytes), "write", path) from error


def _number_of(said: str, path: str, needed_bytes: int) -> int:
    """Return the number of an error of which torch says a sentence, or nothing of its cause."""
    for number in (*_FORBIDDEN, *FULL, errno.EIO):
        if os.strerror(number) in said:
            return number
    space = os.statvfs(os.path.dirname(path))
    is_full = space.f_bavail * space.f_frsize < max(needed_bytes - _taken(path), 1)
    return errno.ENOSPC if is_full else errno.EIO


def _taken(path: str) -> int:
    """Return the space that a file, or the files of a directory, have by now."""
    files = [path]
    if os.path.isdir(path):
        files = [entry.path for entry in os.scandir(path)]
    return sum(os.stat(file).st_blocks * 512 for file in files if os.path.exists(file))


def _try_out(backend: Backend, partial: str, needed_bytes: int) -> None:
    backend.create(partial, 0).close()
    backend.remove(partial)
    if backend.free_bytes(os.path.dirname(partial)) < needed_bytes:
        raise StorageError(errno.ENOSPC, f"reserve {needed_bytes} bytes", partial)


def _named(
    backend: Backend, error: StorageError, target: str, needed_bytes: int
) -> StoreError | None:
    """Return what to say of an error of writing; None if it is one of reading, or another."""
    directory = os.path.dirname(target)
    where = os.fsdecode(error.filename or "")
    if where != directory and not where.startswith(f"{target}.partial"):
        return None
    if error.errno in _FORBIDDEN:
        return StoreError(
            error.errno,
            f"cannot be written ({os.strerror(error.errno)}): see who may write there (ls -ld), or "
            f"export elsewhere. {_LEFT_NOTHING}",
            directory,
        )
    if error.errno in FULL:
        free = size(backend.free_bytes(directory))
        return StoreFullError(
            error.errno,
            f"the export needs {size(needed_bytes)} at least, and {free} are free: free some "
            f"space, or export elsewhere. {_LEFT_NOTHING}",
            target,
        )
    return None


def _is_there(backend: Backend, path: str) -> bool:
    try:
        return backend.stat(path) is not None
    except StorageError as error:
        if error.errno in _FORBIDDEN:
            return False  # it cannot be made either, which is said next
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
