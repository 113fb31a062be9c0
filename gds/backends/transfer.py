"""One request, moved completely: cut into direct and buffered parts, resumed after short counts."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import time
from collections.abc import Callable
from typing import Final, Literal

from gds import probe
from gds.backends.hybrid import HybridFile, Mode
from gds.contract import ALIGNMENT
from gds.errors import ShortReadError, StorageError

_AGAIN_ATTEMPTS: Final = 500
_AGAIN_S: Final = 0.01

_FOLIO_BYTES: Final = 2 << 20
"""The page cache's largest unit. One that only overlaps the range to be dropped stays in it."""

Direction = Literal["read", "write"]

_ANY_TIME: Final = contextlib.nullcontext()


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


def cut(offset: int, nbytes: int, request_bytes: int | None) -> list[tuple[int, int]]:
    """Return the parts of a request: start and stop of each, in bytes from the request's start.

    They have nearly the same length, at most `request_bytes` (a multiple of `ALIGNMENT`; None is
    no limit), and meet at file offsets that are multiples of `ALIGNMENT`: no two of them touch the
    same block, and all are as direct as the whole would have been. There is at least one.
    """
    if request_bytes is None or nbytes <= ALIGNMENT:
        return [(0, nbytes)]
    head = offset % ALIGNMENT
    num_parts = -(-(head + nbytes) // request_bytes)
    step = -(-(head + nbytes) // (num_parts * ALIGNMENT)) * ALIGNMENT
    edges = [0, *range(step - head, nbytes, step), nbytes]
    return list(itertools.pairwise(edges))


def check_request_bytes(request_bytes: int | None) -> int | None:
    """Return `request_bytes` if it is one that `cut` takes; raises `ValueError` otherwise."""
    if request_bytes is None or (request_bytes > 0 and request_bytes % ALIGNMENT == 0):
        return request_bytes
    raise ValueError(
        f"request_bytes must be a positive multiple of {ALIGNMENT}, so that every part stays "
        f"aligned for direct I/O, or None to keep requests whole; got {request_bytes}"
    )


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


class OpenDescriptor:
    """A descriptor that is closed once, by whoever closes it first.

    Who opens a file and who takes it over may both have to close it, if an interrupt (Ctrl-C) comes
    between the two: its number may be that of another file by the second time.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def close(self) -> None:
        """Close it, if nobody has. An interrupt at this moment may leave it open."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class Descriptors:
    """The open descriptors of one file; closed by `close`, or when collected."""

    def __init__(
        self,
        buffered_fd: int,
        direct_fd: int,
        memory_alignment: int,
        refused: Callable[[str], None],
        *,
        hybrid: HybridFile | None = None,
        spared: bool = False,
        owner: OpenDescriptor | None = None,
        inode: int = 0,
    ) -> None:
        """Take over two descriptors of one file.

        Args:
            buffered_fd: Goes through the page cache.
            direct_fd: Bypasses it; -1 for none.
            memory_alignment: Bytes, for the memory of direct transfers.
            refused: Called with a reason when the file system refuses a direct transfer that it
                promised to take; returns if buffered transfers will do, raises otherwise.
            hybrid: Decides which requests go direct; None is for all that can.
            spared: There is no `direct_fd` because `hybrid` would send no request there.
            owner: What closes `buffered_fd`, if somebody else may have to close it as well.
            inode: Number of the file; 0 where nobody asks for it.
        """
        self.buffered_fd = buffered_fd
        self.inode = inode
        self._owner = OpenDescriptor(buffered_fd) if owner is None else owner
        self._direct_fd = direct_fd
        self._memory_alignment = memory_alignment
        self._refused = refused
        self._hybrid = hybrid
        self.direct = direct_fd >= 0 or spared
        if direct_fd >= 0:
            # Read-ahead would pull pages into the cache that direct writes then have to evict.
            _advise(buffered_fd, os.POSIX_FADV_RANDOM)

    def move(
        self,
        direction: Direction,
        view: memoryview,
        address: int,
        offset: int,
        path: str,
        part: tuple[int, int] | None = None,
        anew: Mode | None = None,
    ) -> int:
        """Read `view` from `offset`, or write it there; returns how many bytes that was.

        Args:
            direction: Which of the two.
            view: The memory; `address` is that of its first byte.
            address: See `view`.
            offset: Where in the file, in bytes.
            path: For messages.
            part: Start and stop in `view`, in bytes, of what to move; None moves all of it.
                Errors name the whole request, of which this is a part.
            anew: For a read that is to come from the device, whatever the page cache holds: in
                which of the two ways, where there is a choice. None for the usual one.

        Raises:
            ShortReadError: The file ended before the request did.
            StorageError: The kernel reported an error, or took nothing.
        """
        first, last = part or (0, len(view))
        request = _Request(direction, view, offset, first, last)
        if anew is not None and first < last:
            self._drop_cached(offset + first, offset + last)
        start, stop = 0, 0
        if self.direct:
            start, stop = direct_part(
                offset + first, last - first, address + first, self._memory_alignment
            )
            mode = anew
            if mode is None and start < stop and self._hybrid is not None:
                mode = self._hybrid.mode(direction, self.buffered_fd, offset + first, last - first)
            start = stop if mode == "buffered" or self._direct_fd < 0 else start
        try:
            if start < stop:
                self._move_buffered(request, first + start)
                with self._turn(request, "direct"):
                    self._move_direct(request, first + stop)
            self._move_buffered(request, last)
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
        return last - first

    def close(self) -> None:
        """Close both descriptors. Idempotent."""
        if self._hybrid is not None:
            self._hybrid.close()
        direct_fd, self.buffered_fd, self._direct_fd = self._direct_fd, -1, -1
        self._owner.close()
        if direct_fd >= 0:
            os.close(direct_fd)

    def __del__(self) -> None:
        if hasattr(self, "direct"):  # the constructor took them over
            self.close()

    @property
    def takes_turns(self) -> bool:
        """Whether writes to the file may have to wait for others."""
        return self._hybrid is not None and self._hybrid.gate is not None

    def _turn(self, request: _Request, mode: Mode) -> contextlib.AbstractContextManager[None]:
        gate = None if self._hybrid is None else self._hybrid.gate
        if gate is None or request.direction == "read":
            return _ANY_TIME
        return gate.passing(mode)

    def _drop_cached(self, start: int, stop: int) -> None:
        """Have the page cache let go of a range, and of its neighbours in the same units."""
        first = start // _FOLIO_BYTES * _FOLIO_BYTES
        nbytes = -(-stop // _FOLIO_BYTES) * _FOLIO_BYTES - first
        _advise(self.buffered_fd, os.POSIX_FADV_DONTNEED, first, nbytes)

    def _move_buffered(self, request: _Request, stop: int) -> None:
        if request.done < stop:
            with self._turn(request, "buffered"):
                request.move_buffered(self.buffered_fd, stop)

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
    """A transfer of ``view[first:last]`` and how far it has come: `done`, from `view`'s start."""

    def __init__(
        self, direction: Direction, view: memoryview, offset: int, first: int, last: int
    ) -> None:
        self.direction = direction
        self.view = view
        self.offset = offset
        self.first = first
        self.last = last
        self.done = first

    def __str__(self) -> str:
        done = f"{self.direction} of {len(self.view)} bytes, {self.done - self.first} done"
        if self.last - self.first == len(self.view):
            return done
        return f"{done} of the part from {self.first} to {self.last}"

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


def _advise(fd: int, advice: int, offset: int = 0, nbytes: int = 0) -> None:
    with contextlib.suppress(OSError):  # advice only
        os.posix_fadvise(fd, offset, nbytes, advice)
