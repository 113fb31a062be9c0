"""Transfer of one request: cut into direct and buffered parts, and continued after short counts."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import time
from collections.abc import Callable
from typing import Final

from gds import probe
from gds.backends.hybrid import Direction, HybridFile, Mode
from gds.contract import ALIGNMENT
from gds.errors import ShortReadError, StorageError

_AGAIN_ATTEMPTS: Final = 500
"""Number of attempts at a call that the kernel refuses with EAGAIN or EINTR."""

_AGAIN_S: Final = 0.01
_FOLIO_BYTES: Final = 2 << 20
"""Largest unit of the page cache, in bytes. A unit that is only partly within a range to be dropped
stays in the cache."""

_ANY_TIME: Final = contextlib.nullcontext()


def direct_part(offset: int, nbytes: int, address: int, memory_alignment: int) -> tuple[int, int]:
    """Return the part of a request that can be a direct transfer."""
    start = -offset % ALIGNMENT
    stop = (offset + nbytes) // ALIGNMENT * ALIGNMENT - offset
    if stop <= start or (address + start) % memory_alignment:
        return 0, 0
    return start, stop


def cut(offset: int, nbytes: int, request_bytes: int | None) -> list[tuple[int, int]]:
    """Cut a request into parts of at most `request_bytes` bytes, a multiple of `ALIGNMENT`.

    Returns:
        Start and stop of each part, in bytes from the request's start. The parts have nearly the
        same length. They meet at file offsets that are multiples of `ALIGNMENT`: no two of them
        touch the same block, and the same blocks can be direct as without the cuts.
    """
    if request_bytes is None or nbytes <= ALIGNMENT:
        return [(0, nbytes)]
    head = offset % ALIGNMENT
    num_parts = -(-(head + nbytes) // request_bytes)
    step = -(-(head + nbytes) // (num_parts * ALIGNMENT)) * ALIGNMENT
    edges = [0, *range(step - head, nbytes, step), nbytes]
    return list(itertools.pairwise(edges))


def check_request_bytes(request_bytes: int | None) -> int | None:
    """Return `request_bytes` if `cut` accepts it; raises `ValueError` otherwise."""
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
    """Refuse an invalid request, but not a read past the end, before any byte is moved."""
    if offset < 0:
        raise ValueError(f"{what} {path!r}: offset {offset} is negative")
    if what != "write":
        return
    if not writable:
        raise StorageError(errno.EBADF, "write: opened for reading only", path, offset=offset)
    if offset + nbytes > size_bytes:
        raise StorageError(
            errno.EFBIG,
            f"write of {nbytes} bytes (past the end of the file, which has {size_bytes})",
            path,
            offset=offset,
        )


class OpenDescriptor:
    """A descriptor that is closed only once, however often `close` is called.

    If an interrupt (Ctrl-C) comes while a descriptor is handed over, both the function that opened
    it and its new owner may close it. By the second time, the number may be that of another file.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        """Number of the descriptor; -1 once it is closed."""

    def close(self) -> None:
        """Close the descriptor. Idempotent. An interrupt during this call may leave it open."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class Descriptors:
    """The open descriptors of one file, closed by `close` or when this object is collected."""

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
        """Take over two descriptors of one file; `direct_fd` is -1 if there is none.

        `refused` is called with a reason if the file system refuses a direct transfer that it
        promised to take; it raises an error unless buffered transfers are acceptable. If `spared`,
        `direct_fd` is missing only because `hybrid` would never use it. `owner` closes
        `buffered_fd`, if other code may have to close it as well.
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
            # Read-ahead would fill the cache with pages that direct writes then have to evict.
            _advise(buffered_fd, os.POSIX_FADV_RANDOM)

    def move(
        self,
        direction: Direction,
        view: memoryview,
        address: int,
        offset: int,
        path: str,
        part: tuple[int, int] | None = None,
        uncached_mode: Mode | None = None,
    ) -> int:
        """Read a range of the file into `view`, or write `view` to it; blocks until it is moved.

        `address` is that of the first byte of `view`. Only `part` of the request is moved, from a
        start to a stop within `view`, and its length returned; errors name the whole request. A
        read with an `uncached_mode` comes from the device and not from the page cache. A part that
        cannot be direct is buffered in both modes.
        """
        first, last = part or (0, len(view))
        request = _Request(direction, view, offset, first, last)
        if uncached_mode is not None and first < last:
            self._drop_cached(offset + first, offset + last)
        start, stop = 0, 0
        if self.direct:
            start, stop = direct_part(
                offset + first, last - first, address + first, self._memory_alignment
            )
            mode = uncached_mode
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
                errno.ENODATA, f"{request} before the file ended,", path, offset=offset
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
        if hasattr(self, "direct"):  # otherwise the constructor failed before it took them over
            self.close()

    @property
    def takes_turns(self) -> bool:
        """Whether a write to the file may have to wait for other writes."""
        return self._hybrid is not None and self._hybrid.gate is not None

    def _turn(self, request: _Request, mode: Mode) -> contextlib.AbstractContextManager[None]:
        """Return a context in which a request may move bytes in a mode; writes wait to enter it."""
        gate = None if self._hybrid is None else self._hybrid.gate
        if gate is None or request.direction == "read":
            return _ANY_TIME
        return gate.passing(mode)

    def _drop_cached(self, start: int, stop: int) -> None:
        """Drop a range from the page cache, with its neighbours in the same units of the cache."""
        first = start // _FOLIO_BYTES * _FOLIO_BYTES
        nbytes = -(-stop // _FOLIO_BYTES) * _FOLIO_BYTES - first
        _advise(self.buffered_fd, os.POSIX_FADV_DONTNEED, first, nbytes)

    def _move_buffered(self, request: _Request, stop: int) -> None:
        if request.done < stop:
            with self._turn(request, "buffered"):
                request.move_buffered(self.buffered_fd, stop)

    def _move_direct(self, request: _Request, stop: int) -> None:
        """Continue a request by direct transfers up to `stop`; make no more if one is refused."""
        try:
            request.move_direct(self._direct_fd, stop)
        except OSError as error:
            if error.errno not in probe.REFUSALS:
                raise
            self.direct = False
            self._refused(f"a direct {request.direction} was refused ({error.strerror})")
            _advise(self.buffered_fd, os.POSIX_FADV_NORMAL)


class _EndOfFileError(OSError):
    """A read returned no bytes."""


class _Request:
    """A transfer of ``view[first:last]``, from `offset` of the file on, that has reached `done`."""

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
        """Continue through the page cache up to `stop`."""
        while self.done < stop:
            moved = self._call(fd, stop)
            if moved == 0 and self.direction == "read":
                raise _EndOfFileError
            if moved == 0:
                raise OSError(errno.EIO, "the kernel wrote 0 bytes")
            self.done += moved

    def move_direct(self, fd: int, stop: int) -> None:
        """Continue by whole blocks up to `stop`; may end earlier if the kernel moves less.

        After a count that is no multiple of a block, the last block is moved again as a whole: an
        unaligned remainder would be refused. If the kernel moves less than a block, the caller
        moves the rest through the page cache, which succeeds or gives the true error (end of file,
        no space).
        """
        while self.done < stop:
            moved = self._call(fd, stop)
            if moved < ALIGNMENT:
                return
            self.done += moved // ALIGNMENT * ALIGNMENT

    def _call(self, fd: int, stop: int) -> int:
        """Read or write once, repeated after EINTR and EAGAIN; returns the bytes moved."""
        call = os.preadv if self.direction == "read" else os.pwritev
        for _ in range(_AGAIN_ATTEMPTS):
            try:
                return call(fd, [self.view[self.done : stop]], self.offset + self.done)
            except InterruptedError:
                continue
            except BlockingIOError:  # from some network file systems, if they are short of memory
                time.sleep(_AGAIN_S)
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def _advise(fd: int, advice: int, offset: int = 0, nbytes: int = 0) -> None:
    """Give the kernel advice on a range of a file; 0 bytes stand for the rest of the file."""
    with contextlib.suppress(OSError):  # the kernel may ignore advice
        os.posix_fadvise(fd, offset, nbytes, advice)
