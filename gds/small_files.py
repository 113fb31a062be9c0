"""Small files of what was measured: replaced whole, and never trusted when they are read."""

from __future__ import annotations

import contextlib
import os
import stat
from typing import Final

from gds.backends.names import reporting

MOST_BYTES: Final = 64 << 10


def read_small_file(path: str) -> bytes:
    """Return what a regular file holds.

    Raises:
        OSError: There is none, or a symbolic link in its place.
        ValueError: It is something else, or longer than `MOST_BYTES`.
    """
    # O_NONBLOCK: opening a pipe must not wait for its other end.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError(f"{path!r} is not a regular file")
        data = os.read(fd, MOST_BYTES + 1)
    finally:
        os.close(fd)
    if len(data) > MOST_BYTES:
        raise ValueError(f"{path!r} is longer than {MOST_BYTES} bytes")
    return data


def write_small_file(path: str, data: bytes, what: str) -> None:
    """Replace a file, whole or not at all. Not synced: it must be something that can be made anew.

    Args:
        path: Of the file.
        data: Its content.
        what: It is, for messages.

    Raises:
        StorageError: It could not be written.
    """
    beside = f"{path}.new"
    with reporting(f"write {what}", path):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside)  # of a process that died here
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            with open(fd, "wb") as file:
                file.write(data)
            os.rename(beside, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(beside)
            raise
