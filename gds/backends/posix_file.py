"""Open file of the posix backend: it checks requests, cuts them, and submits them to the pools."""
# ruff: noqa: D102 - the protocols of `gds.contract` document the methods

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Protocol

from gds import libc, probe
from gds.backends.hybrid import Direction, Mode
from gds.backends.names import reporting
from gds.backends.threads import Meters, Part, Transfer
from gds.backends.transfer import Descriptors, check_request, cut
from gds.contract import ALIGNMENT, Buffer, File
from gds.errors import ShortReadError, StorageError
from gds.waiting import Pending, wait


class Transfers(Protocol):
    """What a file needs of its backend; `PosixBackend` has it."""

    meters: Meters

    @property
    def request_bytes(self) -> int | None: ...

    def submit(
        self, direction: Direction, moves: Sequence[Part], *, counted: bool = True
    ) -> Transfer: ...

    def check_usable(self, what: str, path: str) -> None: ...

    def forked(self) -> bool: ...


class PosixFile(File):
    """An open file of a `PosixBackend`.

    If a file is collected without `close`, its descriptors are closed after the transfers in
    flight. All methods may be called from any thread.
    """

    def __init__(
        self,
        backend: Transfers,
        path: str,
        descriptors: Descriptors,
        size_bytes: int,
        writable: bool,
    ) -> None:
        """Take over the descriptors of a file."""
        self.path = path
        self._backend = backend
        self._descriptors = descriptors
        self._size_bytes = size_bytes
        self._writable = writable
        self._lock = threading.Lock()
        self._in_flight: set[Pending[int]] = set()
        self._closed = False

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    @property
    def inode(self) -> int:
        return self._descriptors.inode

    @property
    def alignment(self) -> int:
        return ALIGNMENT if self.direct else 1

    @property
    def direct(self) -> bool:
        return self._descriptors.direct

    def read(self, into: Buffer, offset: int) -> Transfer:
        # Only the kernel detects a read past the end; `into` may then hold the bytes before it.
        return self._start("read", into, offset)

    def read_again(self, into: Buffer, offset: int, *, direct: bool) -> Transfer:
        return self._start("read", into, offset, "direct" if direct else "buffered")

    def write(self, source: Buffer, offset: int) -> Transfer:
        return self._start("write", source, offset)

    def read_bytes(self, offset: int, nbytes: int) -> bytes:
        self._check("read", offset)
        if nbytes < 0 or offset + nbytes > self._size_bytes:  # checked before the allocation
            raise ShortReadError(
                errno.ENODATA,
                f"read of {nbytes} bytes from a file of {self._size_bytes}",
                self.path,
                offset=offset,
            )
        data = bytearray(nbytes)
        # The address 1 fits no alignment, so that the whole range is buffered.
        self._descriptors.move("read", memoryview(data), 1, offset, self.path)
        return bytes(data)

    def write_bytes(self, data: bytes, offset: int) -> None:
        self._check("write", offset, len(data))
        move = partial(self._descriptors.move, "write", memoryview(data), 1, offset, self.path)
        if self._descriptors.takes_turns:
            # The write runs on a pool thread, where no interrupt can stop it during its turn.
            self._begin("write", offset, [move], counted=False).result()
        else:
            move()

    def clone(self, source: File, offset: int, nbytes: int) -> bool:
        # The kernel first writes the dirty pages of both files to the device.
        self._check("write", offset, nbytes)
        if not isinstance(source, PosixFile) or (offset | nbytes) % ALIGNMENT:
            return False
        if not nbytes:
            return True
        # Keep both files open: otherwise another file could get the number of a descriptor.
        with source._held("clone"), self._held("clone"):
            fd, source_fd = self._descriptors.buffered_fd, source._descriptors.buffered_fd
            try:
                libc.clone_range(fd, source_fd, offset, nbytes)
            except OSError as error:
                if error.errno in probe.NO_CLONES:
                    return False
                number = error.errno or errno.EIO
                raise StorageError(number, "clone", self.path, offset=offset) from error
        return True

    def sync(self) -> None:
        self._check("sync", 0)
        with reporting("sync", self.path), self._backend.meters["sync"].transfer(0):
            # A sync of one descriptor covers the whole file. fdatasync omits times, which are of no
            # use after a crash, and still writes a size that the data needs.
            os.fdatasync(self._descriptors.buffered_fd)

    def close(self) -> None:
        if self._backend.forked():
            # The transfers in flight belong to the parent. So does the lock, which a thread of the
            # parent may have held at the time of the fork.
            self._closed = True
        else:
            with self._lock:
                self._closed = True
                in_flight = list(self._in_flight)
            wait(in_flight)
        self._descriptors.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "direct" if self.direct else "buffered"
        return f"PosixFile({self.path!r}, {self._size_bytes} bytes, {state})"

    @contextlib.contextmanager
    def _held(self, what: str) -> Iterator[None]:
        """Run the body while the file is open: `close` waits for the end of the body."""
        held: Pending[int] = Pending()
        try:
            with self._lock:
                self._check(what, 0)
                self._in_flight.add(held)
            yield
        finally:
            held.set_result(0)
            with self._lock:
                self._in_flight.discard(held)

    def _start(
        self, direction: Direction, buffer: Buffer, offset: int, uncached_mode: Mode | None = None
    ) -> Transfer:
        self._check(direction, offset, buffer.nbytes)
        return self._begin(direction, offset, self._moves(direction, buffer, offset, uncached_mode))

    def _begin(
        self, direction: Direction, offset: int, moves: Sequence[Part], *, counted: bool = True
    ) -> Transfer:
        """Begin a transfer. If this raises, even by an interrupt, no part of it is running."""
        transfer = None
        try:
            with self._lock:
                self._check(direction, offset)
                transfer = self._backend.submit(direction, moves, counted=counted)
                self._in_flight.add(transfer)
            # The callback is no method of this file: a future must not keep the file open.
            transfer.add_done_callback(partial(_ended, self._lock, self._in_flight))
        except BaseException:
            if transfer is not None:
                transfer.abandon()
                _ended(self._lock, self._in_flight, transfer)
            raise
        return transfer

    def _moves(
        self, direction: Direction, buffer: Buffer, offset: int, uncached_mode: Mode | None
    ) -> list[Part]:
        """Return the parts of a transfer, to run on threads; at least one."""
        if buffer.kind == "device":
            raise TypeError(
                f"{direction} {self.path!r}: the posix backend transfers host memory only, not "
                "device memory; copy through a buffer from allocate()"
            )
        parts = cut(offset, buffer.nbytes, self._backend.request_bytes)
        return [
            partial(self._move, direction, buffer, offset, uncached_mode, part) for part in parts
        ]

    def _move(
        self,
        direction: Direction,
        buffer: Buffer,
        offset: int,
        uncached_mode: Mode | None,
        part: tuple[int, int],
    ) -> int:
        return self._descriptors.move(
            direction, buffer.memoryview(), buffer.address, offset, self.path, part, uncached_mode
        )

    def _check(self, what: Direction | str, offset: int, nbytes: int = 0) -> None:
        """Raise an error if the file or its backend is closed, or the request is invalid."""
        self._backend.check_usable(what, self.path)
        if self._closed:
            raise StorageError(errno.EBADF, f"{what}: this file is closed", self.path)
        check_request(
            what, self.path, offset, nbytes, writable=self._writable, size_bytes=self._size_bytes
        )


def _ended(lock: threading.Lock, in_flight: set[Pending[int]], future: Pending[int]) -> None:
    """Remove a future from a file's transfers in flight."""
    with lock:
        in_flight.discard(future)
