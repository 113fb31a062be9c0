"""Memory in directories whose files are memory: on tmpfs, on hugetlbfs, and on DAX devices.

Such memory is mapped from a file without a name. The kernel counts it as memory of files, not as
anonymous memory of the process, and frees it when the process ends, however it ends.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from dataclasses import dataclass
from typing import Final

from gds import libc
from gds.buffers import HostBuffer
from gds.errors import RefusedError, StorageError
from gds.probe import is_directory, mount_of, scratch_file

_DAX_PAGE_BYTES: Final = 2 << 20
"""Size of the pages that DAX devices are mapped with if everything is aligned to it, in bytes."""


@dataclass(frozen=True, slots=True)
class MemoryPlace:
    """A directory whose files are memory; see `require_memory`."""

    path: str
    filesystem: str
    page_bytes: int

    @property
    def size_bytes(self) -> int | None:
        """Size of the file system in bytes; None if the file system has no limit of its own."""
        found = self._found()
        return found.f_blocks * found.f_frsize if found.f_blocks else None

    @property
    def free_bytes(self) -> int | None:
        """Free space in bytes; None if the file system has no limit of its own."""
        found = self._found()
        return found.f_bavail * found.f_frsize if found.f_blocks else None

    def _found(self) -> os.statvfs_result:
        try:
            return os.statvfs(self.path)
        except OSError as error:
            raise StorageError(error.errno or errno.EIO, "cannot be examined", self.path) from error


class MappedBuffer(HostBuffer):
    """A buffer of zeroed memory of a `MemoryPlace`, which gets it back after the last reference.

    A forked child shares it with its parent.
    """

    __slots__ = ()

    def __init__(self, mapping: mmap.mmap, nbytes: int) -> None:
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self._view = memoryview(mapping)[:nbytes]


def require_memory(directory: str) -> MemoryPlace:
    """Return the description of a directory on tmpfs, on hugetlbfs, or on a DAX device.

    Raises:
        RefusedError: The files of the directory are not memory; the message says on what they are.
        FileNotFoundError: The directory does not exist.
        StorageError: No file can be made in the directory.
    """
    if not is_directory(directory):
        raise RefusedError(f"{directory} is a file, but memory is taken from a directory: name it")
    filesystem = mount_of(directory).filesystem
    try:
        if filesystem == "tmpfs":
            page_bytes = mmap.PAGESIZE
        elif filesystem == "hugetlbfs":
            page_bytes = os.statvfs(directory).f_bsize
        else:
            page_bytes = _DAX_PAGE_BYTES
        with scratch_file(directory) as fd:
            is_dax = libc.is_dax(fd)
    except OSError as error:
        raise StorageError(
            error.errno or errno.EIO, "no file can be made to take memory from", directory
        ) from error
    if filesystem not in ("tmpfs", "hugetlbfs") and not is_dax:
        raise RefusedError(
            f"{directory} is on {filesystem}, whose files are not memory: name a directory on a "
            "DAX device (CXL or persistent memory, mounted with -o dax), on hugetlbfs or on tmpfs"
        )
    return MemoryPlace(directory, filesystem, page_bytes)


def map_memory(directory: MemoryPlace, nbytes: int) -> MappedBuffer:
    """Return zeroed memory of a directory. All of it is reserved: no later use of it can fail.

    Args:
        directory: Result of `require_memory`.
        nbytes: Length in bytes, at least 1. Whole pages of the directory are taken.

    Raises:
        StorageError: The directory has not so much memory left. Nothing is taken. The message has
            the number of bytes, and says what to do.
    """
    whole = -(-nbytes // directory.page_bytes) * directory.page_bytes
    try:
        with scratch_file(directory.path) as fd:
            os.ftruncate(fd, whole)
            os.posix_fallocate(fd, 0, whole)  # a use of memory that is missing would be a SIGBUS
            mapping = mmap.mmap(fd, whole, flags=mmap.MAP_SHARED)
    except OSError as error:
        remedy = ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
            remedy = ": make room there, or ask for less"
            if directory.filesystem == "hugetlbfs":
                remedy = ": reserve more huge pages (sysctl vm.nr_hugepages), or ask for less"
        raise StorageError(
            error.errno or errno.EIO,
            f"{whole} bytes of memory of {directory.filesystem} cannot be reserved{remedy}",
            directory.path,
        ) from error
    return MappedBuffer(mapping, nbytes)
