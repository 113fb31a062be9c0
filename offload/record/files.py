"""The two files of this wing on the file system: replaced whole, appended to, and read with care.

Anybody may have put anything in their place. So no link is followed at the end of a path, only
regular files are opened, no call waits for another process, and of a file only so many bytes are
read.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

from offload.errors import StoreError

_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFDIR: "a directory",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}

_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""Opening a FIFO for reading does not wait for a writer, and then shows that it is one."""


def require_directory(path: str) -> None:
    """Raise `StoreError` if a path is not that of a directory."""
    if not os.path.isdir(path):
        raise StoreError(
            errno.ENOTDIR, "there is no such directory: name the one that the run was given", path
        )


def read_regular(path: str, most_bytes: int) -> bytes:
    """Return the content of a regular file.

    Args:
        path: Path of the file.
        most_bytes: Largest number of bytes that the file may have.

    Raises:
        StoreError: The file is missing, is none, cannot be read, or is larger. The message says
            which, in one line.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | _FLAGS)
    except OSError as error:
        raise StoreError(error.errno or errno.EIO, _why_not_opened(path, error), path) from None
    try:
        _require_regular(descriptor, path)
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(most_bytes + 1)
    except OSError as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(
            error.errno or errno.EIO, f"cannot be read: {error.strerror}", path
        ) from None
    finally:
        os.close(descriptor)
    if len(data) > most_bytes:
        raise StoreError(
            errno.EFBIG,
            f"this file has more than {most_bytes} bytes, so no run has written it: remove it",
            path,
        )
    return data


def replace(path: str, data: bytes) -> None:
    """Replace a file, or whatever else has its name, atomically and without syncing it.

    Raises:
        OSError: The file could not be written; an earlier one is still there.
    """
    beside = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.new")
    with suppress(FileNotFoundError):
        os.unlink(beside)  # of a process that was killed
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o666)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        os.replace(beside, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(beside)
        raise


def append(path: str, data: bytes) -> int:
    """Append whole lines to a file, which is made if it is missing; return its new size in bytes.

    A line that an earlier process has left unfinished is ended. A file with other hard links, as in
    a copy of the store by ``cp -al``, becomes a file of its own, so that the copy stays as it is.

    Raises:
        OSError: The lines could not be written.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | _FLAGS, 0o666)
    try:
        found = _require_regular(descriptor, path)
        if found.st_size and os.pread(descriptor, 1, found.st_size - 1) != b"\n":
            data = b"\n" + data
        if found.st_nlink > 1:
            data = os.pread(descriptor, found.st_size, 0) + data
            replace(path, data)
            return len(data)
        os.write(descriptor, data)
        return found.st_size + len(data)
    finally:
        os.close(descriptor)


def _require_regular(descriptor: int, path: str) -> os.stat_result:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise StoreError(errno.EINVAL, _is_other(found.st_mode), path)
    return found


def _is_other(mode: int) -> str:
    kind = _KINDS.get(stat.S_IFMT(mode), "not a file")
    return f"this is {kind}, and no run has written it: remove it"


def _why_not_opened(path: str, error: OSError) -> str:
    """Return why a file could not be opened, and what to do."""
    with suppress(OSError):
        mode = os.lstat(path).st_mode
        if not stat.S_ISREG(mode):
            return _is_other(mode)
        return f"cannot be read: {error.strerror}"
    return "there is no such file: no run has been recorded in this directory"
