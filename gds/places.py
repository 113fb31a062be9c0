"""Checks of a path that a user names, with messages that say what to name instead."""

from __future__ import annotations

import errno
import os
import stat

from gds import probe
from gds.errors import RefusedError, StorageError


def is_directory(path: str) -> bool:
    """Return True if a path is a directory, False if it is a regular file.

    Raises:
        FileNotFoundError: The path does not exist.
        RefusedError: The path is a device, a pipe or a socket. For a block device the message
            says what to name instead.
        StorageError: The system cannot examine the path.
    """
    try:
        found = os.stat(path)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            errno.ENOENT, "no such file or directory: create it, or name another", path
        ) from error
    except NotADirectoryError as error:
        raise FileNotFoundError(
            errno.ENOENT, "no such file or directory: a parent in this path is a file", path
        ) from error
    except OSError as error:
        raise StorageError(error.errno or errno.EIO, "cannot be examined", path) from error
    if stat.S_ISBLK(found.st_mode):
        raise RefusedError(
            f"{path} is a block device, but only files can be used: {_instead(found)}"
        )
    if not (stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode)):
        raise RefusedError(f"{path} is neither a directory nor a regular file")
    return stat.S_ISDIR(found.st_mode)


def _instead(device: os.stat_result) -> str:
    """Return the advice that names a directory to use instead of a block device."""
    points = probe.mount_points(os.major(device.st_rdev), os.minor(device.st_rdev))
    if not points:
        return "mount its file system, and name a directory in it"
    return f"name a directory in {points[0]}, where it is mounted"


def kernel_view(place: str, filesystem: str) -> RefusedError:
    """Return the error for a place in one of `gds.probe.KERNEL_FILESYSTEMS`."""
    return RefusedError(
        f"{place} is {filesystem}, a view of the kernel without files on a drive: "
        "name a directory on a drive"
    )
