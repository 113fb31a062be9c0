"""System calls that Python does not wrap: `statx`, `renameat2`, `cachestat`, clones of ranges.

If the C library lacks one of them (glibc before 2.28, musl), the functions return None or raise
ENOSYS, and callers fall back.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import struct
from typing import Final

RENAME_NOREPLACE: Final = 1
RENAME_EXCHANGE: Final = 2

_AT_FDCWD: Final = -100
_AT_EMPTY_PATH: Final = 0x1000
_STATX_MNT_ID: Final = 0x1000
_STATX_DIOALIGN: Final = 0x2000
_STATX_BYTES: Final = 256
_ATTRIBUTES_AT: Final = 0x08
_ATTRIBUTE_DAX: Final = 0x200000
_MNT_ID_AT: Final = 0x90
_DIO_ALIGN_AT: Final = 0x98

# From linux/fs.h; Python defines FICLONERANGE from 3.12 on.
_CLONE_RANGE: Final = getattr(fcntl, "FICLONERANGE", 0x4020940D)

_CACHESTAT: Final = 451  # new system calls have the same number on every architecture

_libc: Final = ctypes.CDLL(None, use_errno=True)

# PyDLL holds the GIL during the call, which never waits and takes less time than releasing it.
_cachestat: Final = getattr(ctypes.PyDLL(None), "syscall", None)
if _cachestat is not None:
    _cachestat.restype = ctypes.c_long
    _cachestat.argtypes = (
        ctypes.c_long,
        ctypes.c_int,
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_uint,
    )


def direct_alignment(fd: int) -> tuple[int, int] | None:
    """Return the alignment that the kernel requires of direct transfers on an open file.

    Returns:
        Alignment of memory, and alignment of offset and length, both in bytes. ``(0, 0)`` means
        that this file takes no direct transfers. None means that the kernel (before 6.1) or the
        file system does not report an alignment.
    """
    buffer = _statx(fd, _STATX_DIOALIGN)
    if buffer is None or not _mask(buffer) & _STATX_DIOALIGN:
        return None
    memory, offset = struct.unpack_from("=II", buffer, _DIO_ALIGN_AT)
    return memory, offset


def mount_id(fd: int) -> int | None:
    """Return the kernel's number of the mount that holds an open file; None if not reported.

    It is the first field of the mount's line in ``/proc/self/mountinfo``.
    """
    buffer = _statx(fd, _STATX_MNT_ID)
    if buffer is None or not _mask(buffer) & _STATX_MNT_ID:
        return None
    (number,) = struct.unpack_from("=Q", buffer, _MNT_ID_AT)
    return int(number)


def is_dax(fd: int) -> bool:
    """Return whether an open file is memory of a DAX device, used without the page cache.

    It is False if the kernel (before 5.8) does not report that.
    """
    buffer = _statx(fd, 0)
    if buffer is None:
        return False
    (attributes,) = struct.unpack_from("=Q", buffer, _ATTRIBUTES_AT)
    return bool(attributes & _ATTRIBUTE_DAX)


def rename_with(source: str, target: str, flags: int) -> None:
    """Rename with ``RENAME_*`` flags.

    Raises:
        OSError: The rename failed; ENOSYS if the C library lacks the call.
    """
    call = getattr(_libc, "renameat2", None)
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), source, None, target)
    ctypes.set_errno(0)
    if call(
        ctypes.c_int(_AT_FDCWD),
        ctypes.c_char_p(os.fsencode(source)),
        ctypes.c_int(_AT_FDCWD),
        ctypes.c_char_p(os.fsencode(target)),
        ctypes.c_uint(flags),
    ):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), source, None, target)


def clone_range(fd: int, source_fd: int, offset: int, nbytes: int) -> None:
    """Let a range of one open file share the disk space of the same range of another.

    Args:
        fd: Descriptor of the target file, open for writing through the page cache.
        source_fd: Descriptor of the source file, open for reading.
        offset: Start of the range in both files, in bytes.
        nbytes: Length of the range; 0 would mean the rest of the file.

    Raises:
        OSError: The range cannot be shared (EOPNOTSUPP, ENOTTY, EINVAL, EXDEV and others).
    """
    fcntl.ioctl(fd, _CLONE_RANGE, struct.pack("=qQQQ", source_fd, offset, nbytes, offset))


def cached_bytes(fd: int, nbytes: int, offset: int = 0) -> int | None:
    """Return how many bytes of a range of an open file the page cache holds, in whole pages.

    None means that the kernel (before 6.5) cannot tell.
    """
    if _cachestat is None:
        return None
    wanted = struct.pack("=QQ", offset, nbytes)
    answer = ctypes.create_string_buffer(5 * 8)
    if _cachestat(_CACHESTAT, fd, wanted, answer, 0):
        return None
    (pages,) = struct.unpack_from("=Q", answer, 0)
    return int(pages) * mmap.PAGESIZE


def _statx(fd: int, mask: int) -> bytes | None:
    """Return the ``struct statx`` of an open file, or None if the call is missing or fails."""
    call = getattr(_libc, "statx", None)
    if call is None:
        return None
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    failed = call(
        ctypes.c_int(fd),
        ctypes.c_char_p(b""),
        ctypes.c_int(_AT_EMPTY_PATH),
        ctypes.c_uint(mask),
        buffer,
    )
    return None if failed else buffer.raw


def _mask(buffer: bytes) -> int:
    """Return the bits that say which fields of a ``struct statx`` are filled."""
    (mask,) = struct.unpack_from("=I", buffer, 0)
    return int(mask)
