"""The system calls that Python does not wrap: `statx`, `renameat2`, `cachestat`, clones of ranges.

Where the C library lacks one of them (glibc before 2.28, musl) the answer is "the kernel did not
say" or ENOSYS, and callers fall back.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import struct
from typing import Any, Final

RENAME_NOREPLACE: Final = 1
RENAME_EXCHANGE: Final = 2

_AT_FDCWD: Final = -100
_AT_EMPTY_PATH: Final = 0x1000
_STATX_MNT_ID: Final = 0x1000
_STATX_DIOALIGN: Final = 0x2000
_STATX_BYTES: Final = 256
_MNT_ID_AT: Final = 0x90
_DIO_ALIGN_AT: Final = 0x98

# From linux/fs.h; Python has it from 3.12 on.
_CLONE_RANGE: Final = getattr(fcntl, "FICLONERANGE", 0x4020940D)

_CACHESTAT: Final = 451  # of every architecture: it is newer than their differences

_libc: Final = ctypes.CDLL(None, use_errno=True)

# With the interpreter's lock held: the call never waits, and is shorter than giving the lock up.
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
    """Return what the kernel asks of direct transfers on an open file.

    Returns:
        Alignment of memory and of offset and length, both in bytes; ``(0, 0)`` says that this file
        takes no direct transfers; None says that the kernel (before 6.1) or the file system does
        not tell.
    """
    buffer = _statx(fd, _STATX_DIOALIGN)
    if buffer is None or not _mask(buffer) & _STATX_DIOALIGN:
        return None
    memory, offset = struct.unpack_from("=II", buffer, _DIO_ALIGN_AT)
    return memory, offset


def mount_id(fd: int) -> int | None:
    """Return the first field of the line in ``/proc/self/mountinfo`` that an open file is on."""
    buffer = _statx(fd, _STATX_MNT_ID)
    if buffer is None or not _mask(buffer) & _STATX_MNT_ID:
        return None
    (number,) = struct.unpack_from("=Q", buffer, _MNT_ID_AT)
    return int(number)


def rename_with(source: str, target: str, flags: int) -> None:
    """Rename with ``RENAME_*`` flags; raises `OSError`, with ENOSYS where the call is missing."""
    call = _function("renameat2")
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
    """Let a range of an open file share the space of the same range of another one.

    Args:
        fd: Open for writing, through the page cache.
        source_fd: Open for reading.
        offset: Where the range begins in both, in bytes.
        nbytes: Its length, not 0: that would mean the rest of the file.

    Raises:
        OSError: EOPNOTSUPP, ENOTTY, EINVAL, EXDEV and others where it cannot be done.
    """
    fcntl.ioctl(fd, _CLONE_RANGE, struct.pack("=qQQQ", source_fd, offset, nbytes, offset))


def cached_bytes(fd: int, nbytes: int, offset: int = 0) -> int | None:
    """Return how much of `nbytes` bytes from `offset` of an open file the page cache holds.

    In whole pages. None says that the kernel (before 6.5) does not tell.
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
    call = _function("statx")
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
    (mask,) = struct.unpack_from("=I", buffer, 0)
    return int(mask)


def _function(name: str) -> Any:
    return getattr(_libc, name, None)
