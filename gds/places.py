"""What is at a path that a user has named, and what to say where that cannot be used."""

from __future__ import annotations

import errno
import os
import stat

from gds import probe
from gds.errors import RefusedError, StorageError


def is_directory(path: str) -> bool:
    """Return whether a path is a directory; False for a regular file.

    Raises:
        FileNotFoundError: There is nothing there.
        RefusedError: It is a device, a pipe or a socket; says what to name instead.
        StorageError: It cannot be looked at.
    """
    try:
        found = os.stat(path)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            errno.ENOENT, "there is nothing of this name: make the directory, or name another", path
        ) from error
    except NotADirectoryError as error:
        raise FileNotFoundError(
            errno.ENOENT, "there is nothing of this name: a part of it is a file", path
        ) from error
    except OSError as error:
        raise StorageError(error.errno or errno.EIO, "cannot be looked at", path) from error
    if stat.S_ISBLK(found.st_mode):
        raise RefusedError(f"{path} is a block device, and only files are used: {_instead(found)}")
    if not (stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode)):
        raise RefusedError(f"{path} is neither a directory nor a regular file")
    return stat.S_ISDIR(found.st_mode)


def _instead(device: os.stat_result) -> str:
    points = probe.mount_points(os.major(device.st_rdev), os.minor(device.st_rdev))
    if not points:
        return "mount a file system of it, and name a directory in that"
    return f"name a directory in {points[0]}, where it is mounted"
