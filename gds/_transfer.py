"""One request, moved completely: cut into direct and buffered parts, resumed after short counts."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable
from typing import Final, Literal

from gds import probe
from gds._backend import ALIGNMENT
from gds._errors import ShortReadError, StorageError

_AGAIN_ATTEMPTS: Final = 500
_AGAIN_S: Final = 0.01

Direction = Literal["read", "write"]


def direct_part(offset: int, nbytes: int, address: int, memory_alignment: int) -> tuple[int, int]:
    """Return start and stop, in bytes from the request's start, of what can go direct.

    That is its whole blocks of `ALIGNMENT`, if their memory starts at a multiple of
    `memory_alignment`; otherwise nothing, as ``(0, 0)``. The blocks are at least a page, so that
    a direct and a buffered transfer never touch the same page.
    """
    start = -offset % ALIGNMENT
    stop = (offset + nbytes) // ALIGNMENT * ALIGNMENT - offset
    if stop <= start or (address + start) % memory_alignment:
        return 0, 0
    return start, stop


def check_request(
    what: Direction | str,
    path: str,
    offset: int,
    nbytes: int,
    *,
    writable: bool,
    size_bytes: int,
) -> None:
    """Refuse what is wrong with a request from the start, before a byte of it is moved.

    Raises:
        ValueError: `offset` is negative.
        StorageError: A write to a file opened for reading (EBADF), or past its end (EFBIG).
    """
    if offset < 0:
        raise ValueError(f"{what} {path!r}: offset {offset} is negative")
    if what != "write":
        return
    if not writable:
        raise StorageError(errno.EBADF, "write: opened for reading only", path, offset=offset)
    if offset + nbytes > size_bytes:
        raise StorageError(
            errno.EFBIG,
            f"write of {nbytes} bytes would leave the file, which has {size_bytes},",
            path,
            offset=offset,
        )


class Descriptors:
    """The open descriptors of one file; closed by `close`, or when collected."""

    def __init__(
        self,
        buffered_fd: int,
        direct_fd: int,
        memory_alignment: int,
        refused: Callable[[str], None],
    ) -> None:
        """Take over two descriptors of one file.

        Args:
            buffered_fd: Goes through the page cache.
            direct_fd: Bypasses it; -1 for none.
            memory_alignment: Bytes, for the memory of direct transfers.
            refused: Called with a reason when the file system refuses a direct transfer that it
                promised to take; returns if buffered transfers will do, raises otherwise.
        """
        self.buffered_fd = buffered_fd
        self._direct_fd = direct_fd
        self._memory_alignment = memory_alignment
        self._refused = refused
        self.direct = direct_fd >= 0
        if self.direct:
            # Read-ahead would pull pages into the cache that direct writes then have to evict.
            _advise(buffered_fd, os.POSIX_FADV_RANDOM)

    def move(
        self, direction: Direction, view: memoryview, address: int, offset: int, path: str
    ) -> int:
        """Read all of `view` from `offset`, or write all of it there; returns its length, bytes.

        Args:
            direction: Which of the two.
            view: The memory; `address` is that of its first byte.
            address: See `view`.
            offset: Where in the file, in bytes.
            path: For messages.

        Raises:
            ShortReadError: The file ended before the request did.
            StorageError: The kernel reported an error, or took nothing.
        """
        request = _Request(direction, view, offset)
        start, stop = 0, 0
        if self.direct:
            start, stop = direct_part(offset, len(view), address, self._memory_alignment)
        try:
            if start < stop:
                request.move_buffered(self.buffered_fd, start)
                self._move_direct(request, stop)
            request.move_buffered(self.buffered_fd, len(view))
        except StorageError:
            raise
        except _EndOfFileError:
            raise ShortReadError(
                errno.ENODATA, f"{request} when the file ended,", path, offset=offset
            ) from None
        except OSError as error:
            raise StorageError(
                error.errno or errno.EIO, str(request), path, offset=offset
            ) from error
        return len(view)

    def close(self) -> None:
        """Close both descriptors. Idempotent."""
        fds, self.buffered_fd, self._direct_fd = (self.buffered_fd, self._direct_fd), -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    def __del__(self) -> None:
        if hasattr(self, "direct"):  # the constructor took them over
            self.close()

    def _move_direct(self, request: _Request, stop: int) -> None:
        try:
            request.move_direct(self._direct_fd, stop)
        except OSError as error:
            if error.errno not in probe.REFUSALS:
                raise
            self.direct = False
            self._refused(f"a direct {request.direction} was refused ({error.strerror})")
            _advise(self.buffered_fd, os.POSIX_FADV_NORMAL)


class _EndOfFileError(OSError):
    """A read returned nothing."""


class _Request:
    """A transfer and how far it has come: `done` bytes from the start of `view`."""

    def __init__(self, direction: Direction, view: memoryview, offset: int) -> None:
        self.direction = direction
        self.view = view
        self.offset = offset
        self.done = 0

    def __str__(self) -> str:
        return f"{self.direction} of {len(self.view)} bytes, {self.done} done"

    def move_buffered(self, fd: int, stop: int) -> None:
        """Go on through the page cache, up to `stop` bytes from the start of the request."""
        while self.done < stop:
            moved = self._call(fd, stop)
            if moved == 0 and self.direction == "read":
                raise _EndOfFileError
            if moved == 0:
                raise OSError(errno.EIO, "the kernel took nothing")
            self.done += moved

    def move_direct(self, fd: int, stop: int) -> None:
        """Go on by whole blocks up to `stop`; stays behind it where the kernel moves less.

        After an odd count the block is moved again as a whole: an unaligned remainder would be
        refused. Less than a block is left to the page cache, which either can, or gives the true
        reason (end of file, no space).
        """
        while self.done < stop:
            moved = self._call(fd, stop)
            if moved < ALIGNMENT:
                return
            self.done += moved // ALIGNMENT * ALIGNMENT

    def _call(self, fd: int, stop: int) -> int:
        call = os.preadv if self.direction == "read" else os.pwritev
        for _ in range(_AGAIN_ATTEMPTS):
            try:
                return call(fd, [self.view[self.done : stop]], self.offset + self.done)
            except InterruptedError:
                continue
            except BlockingIOError:  # some network file systems, when short of memory
                time.sleep(_AGAIN_S)
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def _advise(fd: int, advice: int) -> None:
    with contextlib.suppress(OSError):  # advice only
        os.posix_fadvise(fd, 0, 0, advice)


def _call(direction: Direction, fd: int, view: memoryview, offset: int) -> int:
    for _ in range(_AGAIN_ATTEMPTS):
        try:
            if direction == "read":
                return os.preadv(fd, [view], offset)
            return os.pwritev(fd, [view], offset)
        except InterruptedError:
            continue
        except BlockingIOError:  # some network file systems, when short of memory
            time.sleep(_AGAIN_S)
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
