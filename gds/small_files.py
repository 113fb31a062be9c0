"""Small files with results of measurements: replaced as a whole, and distrusted when read."""

from __future__ import annotations

import contextlib
import os
import stat
from typing import Final

from gds.backends.names import reporting

MOST_BYTES: Final = 64 << 10


def read_small_file(path: str) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: The file does not exist, is a symbolic link, or cannot be read.
        ValueError: The path is not a regular file, or the file is longer than `MOST_BYTES`.
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
    """Replace a file as a whole or not at all; `what` names its content in messages.

    The file is not synced, so use this only for content that can be made again after a crash.
    """
    beside = f"{path}.new"
    with reporting(f"write {what}", path):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside)  # left by a process that died before the rename
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            with open(fd, "wb") as file:
                file.write(data)
            os.rename(beside, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(beside)
            raise
