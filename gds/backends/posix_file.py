"""An open file of the posix backend: checks each request, cuts it up, and hands it to the pools."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Protocol

from gds import libc, probe
from gds.backends.closing import Closing
from gds.backends.hybrid import Mode
from gds.backends.names import reporting
from gds.backends.threads import Meter, Part, Transfer
from gds.backends.transfer import Descriptors, Direction, check_request, cut
from gds.contract import ALIGNMENT, Buffer, File
from gds.errors import ShortReadError, StorageError
from gds.waiting import Pending, wait


class Transfers(Protocol):
    """What a file needs of its backend."""

    sync_meter: Meter

    @property
    def request_bytes(self) -> int | None:
        """Most bytes that are asked of the kernel at once; None where transfers stay whole."""
        ...

    def submit(
        self, direction: Direction, moves: Sequence[Part], *, counted: bool = True
    ) -> Transfer:
        """Run the parts of a transfer on threads, and count it as one if all of them succeed."""
        ...

    def check_usable(self, what: str, path: str) -> None:
        """Raise `StorageError` (EBADF) if the backend is closed, or this is a forked child."""
        ...

    def forked(self) -> bool:
        """Return whether this process is a forked child of the one that made the backend."""
        ...


class PosixFile(Closing):
    """An open file of a `PosixBackend`; see `gds.File` for what each operation promises.

    Collected without `close` it releases its descriptors, after transfers in flight.
    """

    def __init__(
        self,
        backend: Transfers,
        path: str,
        descriptors: Descriptors,
        size_bytes: int,
        writable: bool,
    ) -> None:
        """Take over `descriptors`."""
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
        """Size at opening, in bytes."""
        return self._size_bytes

    @property
    def inode(self) -> int:
        """Number of the file, as `gds.Stat` has it; 0 if it was not opened by a backend."""
        return self._descriptors.inode

    @property
    def alignment(self) -> int:
        """`gds.ALIGNMENT` where transfers can be direct, 1 (byte) where none is."""
        return ALIGNMENT if self.direct else 1

    @property
    def direct(self) -> bool:
        """Whether aligned requests bypass the page cache."""
        return self._descriptors.direct

    def read(self, into: Buffer, offset: int) -> Transfer:
        """Start reading `into.nbytes` bytes from `offset` (bytes).

        Reading past the end is found out by the kernel: the future raises `ShortReadError`, and
        `into` may hold what there was.
        """
        return self._start("read", into, offset)

    def read_again(self, into: Buffer, offset: int, *, direct: bool) -> Transfer:
        """Start reading a range anew from the device; see `gds.File.read_again`."""
        return self._start("read", into, offset, "direct" if direct else "buffered")

    def write(self, source: Buffer, offset: int) -> Transfer:
        """Start writing all of `source` at `offset` (bytes).

        Raises:
            StorageError: At once and with nothing written: the range does not end within the
                file (EFBIG), or the file was opened for reading (EBADF).
        """
        return self._start("write", source, offset)

    def read_bytes(self, offset: int, nbytes: int) -> bytes:
        """Read a small range through the page cache, now."""
        self._check("read", offset)
        if nbytes < 0 or offset + nbytes > self._size_bytes:  # before anything is allocated
            raise ShortReadError(
                errno.ENODATA,
                f"read of {nbytes} bytes from a file of {self._size_bytes}",
                self.path,
                offset=offset,
            )
        data = bytearray(nbytes)
        # An address that suits no alignment: all of it buffered.
        self._descriptors.move("read", memoryview(data), 1, offset, self.path)
        return bytes(data)

    def write_bytes(self, data: bytes, offset: int) -> None:
        """Write a small range through the page cache, now; it must end within the file."""
        self._check("write", offset, len(data))
        move = partial(self._descriptors.move, "write", memoryview(data), 1, offset, self.path)
        if self._descriptors.takes_turns:
            # On a thread that no interrupt can stop while it is its turn.
            self._begin("write", offset, [move], counted=False).result()
        else:
            move()

    def clone(self, source: File, offset: int, nbytes: int) -> bool:
        """Share the space of a range of another file; see `gds.File.clone`.

        The kernel first brings what is still in the page cache of either to the device.
        """
        self._check("write", offset, nbytes)
        if not isinstance(source, PosixFile) or (offset | nbytes) % ALIGNMENT:
            return False
        if not nbytes:
            return True
        # Neither is closed meanwhile: another file could get the number of its descriptor.
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
        """Make everything written to this file durable, and its size. Never retried."""
        self._check("sync", 0)
        with reporting("sync", self.path), self._backend.sync_meter.transfer(0):
            # One descriptor stands for the file. Data-only: times are of no use after a crash,
            # and the kernel flushes a size that the data needs.
            os.fdatasync(self._descriptors.buffered_fd)

    def close(self) -> None:
        """Wait for transfers in flight, then release the file. Idempotent."""
        if self._backend.forked():
            # What was in flight belongs to the parent, as does the lock, perhaps held.
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
        """Let `close` wait for the block."""
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
        self, direction: Direction, buffer: Buffer, offset: int, anew: Mode | None = None
    ) -> Transfer:
        self._check(direction, offset, buffer.nbytes)
        return self._begin(direction, offset, self._moves(direction, buffer, offset, anew))

    def _begin(
        self, direction: Direction, offset: int, moves: Sequence[Part], *, counted: bool = True
    ) -> Transfer:
        """Begin a transfer. If this raises, an interrupt included, nothing of it is running."""
        transfer = None
        try:
            with self._lock:
                self._check(direction, offset)
                transfer = self._backend.submit(direction, moves, counted=counted)
                self._in_flight.add(transfer)
            # Not a method of this file: a future that is kept must not keep the file open.
            transfer.add_done_callback(partial(_ended, self._lock, self._in_flight))
        except BaseException:
            if transfer is not None:
                transfer.abandon()
                _ended(self._lock, self._in_flight, transfer)
            raise
        return transfer

    def _moves(
        self, direction: Direction, buffer: Buffer, offset: int, anew: Mode | None
    ) -> list[Part]:
        """Return the parts of a transfer, as threads will run them; at least one.

        `anew` is for reads: from the device, in this way; None for the usual way.
        """
        if buffer.kind == "device":
            raise TypeError(
                f"{direction} {self.path!r}: the posix backend moves host memory only, not "
                f"memory of a device; copy through a buffer of allocate()"
            )
        parts = cut(offset, buffer.nbytes, self._backend.request_bytes)
        return [partial(self._move, direction, buffer, offset, anew, part) for part in parts]

    def _move(
        self,
        direction: Direction,
        buffer: Buffer,
        offset: int,
        anew: Mode | None,
        part: tuple[int, int],
    ) -> int:
        return self._descriptors.move(
            direction, buffer.memoryview(), buffer.address, offset, self.path, part, anew
        )

    def _check(self, what: Direction | str, offset: int, nbytes: int = 0) -> None:
        self._backend.check_usable(what, self.path)
        if self._closed:
            raise StorageError(errno.EBADF, f"{what}: this file is closed", self.path)
        check_request(
            what, self.path, offset, nbytes, writable=self._writable, size_bytes=self._size_bytes
        )


def _ended(lock: threading.Lock, in_flight: set[Pending[int]], future: Pending[int]) -> None:
    with lock:
        in_flight.discard(future)
