"""An open file of the KvikIO backend: which handle moves which part of a request."""

from __future__ import annotations

import errno
import threading
from collections import Counter
from functools import partial
from typing import Final, NamedTuple, Protocol, TypeAlias

from gds.backends.hybrid import Mode
from gds.backends.kvikio_library import Handle, is_end_of_file, storage_error, whole_blocks
from gds.backends.posix_file import PosixFile, Transfers
from gds.backends.threads import Part
from gds.backends.transfer import Descriptors, Direction, cut, direct_part
from gds.buffers.cuda import Cuda, Event
from gds.buffers.device import DeviceBuffer, DeviceBytes
from gds.buffers.host import HostBuffer
from gds.buffers.pool import BufferPool
from gds.contract import ALIGNMENT, Buffer
from gds.errors import ShortReadError
from gds.paths import DevicePath


class Used(NamedTuple):
    """The path of device memory in one direction."""

    path: DevicePath

    reason: str
    """Why it is not GPUDirect Storage, for people; empty where it is."""


class Opened(NamedTuple):
    """A direction of an open file: the path that it takes, and the handle where that has one."""

    used: Used
    handle: Handle | None


Handles: TypeAlias = dict[Direction, Opened]


class DeviceTransfers(Transfers, Protocol):
    """What a file needs of its backend besides."""

    cuda: Cuda
    staging: BufferPool[HostBuffer]
    """Page-locked, for what does not go to the device directly."""

    @property
    def device_request_bytes(self) -> int | None:
        """Most bytes of a part of a request for device memory; None where KvikIO cuts it up."""
        ...

    def open_handles(self, path: str, fd: int, *, writable: bool) -> Handles:
        """Decide on the path of each direction, and open the file for it."""
        ...

    def count_path(self, direction: Direction, path: DevicePath, nbytes: int) -> None:
        """Note which way bytes of device memory went."""
        ...

    def abandon(self, handles: Handles) -> None:
        """Keep handles that belong to the parent of this forked child from being closed here."""
        ...


class KvikioFile(PosixFile):
    """An open file of a `KvikioBackend`; see `gds.File` for what each operation promises.

    Host memory takes the POSIX path. For device memory the file is opened once more by KvikIO when
    the first transfer needs it: most small files never see one. Whole blocks whose memory is as
    aligned as their place in the file go through that handle; the rest is copied through
    page-locked host memory, so that no block is ever read, changed and written back by cuFile
    while its neighbour is written.
    """

    def __init__(
        self,
        backend: DeviceTransfers,
        path: str,
        descriptors: Descriptors,
        size_bytes: int,
        writable: bool,
    ) -> None:
        super().__init__(backend, path, descriptors, size_bytes, writable)
        self._device_backend = backend
        self._handles: Handles | None = None
        self._opening = threading.Lock()

    def used(self, direction: Direction) -> Used:
        """Say which path whole blocks of device memory take, and why not a better one."""
        self._check(direction, 0)
        return self._opened(direction).used

    def close(self) -> None:
        """Wait for transfers in flight, then release the file. Idempotent."""
        super().close()
        if self._device_backend.forked():
            if self._handles:
                self._device_backend.abandon(self._handles)
            return
        with self._opening:
            handles, self._handles = self._handles, None
        for opened in (handles or {}).values():
            if opened.handle is not None:
                opened.handle.close()

    def _moves(
        self, direction: Direction, buffer: Buffer, offset: int, anew: Mode | None
    ) -> list[Part]:
        if not isinstance(buffer, DeviceBuffer):
            return super()._moves(direction, buffer, offset, anew)
        events = buffer.region.events(buffer.address, buffer.address + buffer.nbytes)
        transfer = _DeviceTransfer(self, direction, buffer, offset, events, anew)
        parts = cut(offset, buffer.nbytes, self._device_backend.device_request_bytes)
        return [partial(transfer.move, part) for part in parts]

    def _opened(self, direction: Direction) -> Opened:
        with self._opening:
            if self._handles is None:
                self._handles = self._device_backend.open_handles(
                    self.path, self._descriptors.buffered_fd, writable=self._writable
                )
            return self._handles[direction]


class _DeviceTransfer:
    """One request for device memory. It owns buffer and file while KvikIO does not."""

    def __init__(
        self,
        file: KvikioFile,
        direction: Direction,
        buffer: DeviceBuffer,
        offset: int,
        events: list[Event],
        anew: Mode | None,
    ) -> None:
        """Take note of a request; one that reads anew goes through host memory as a whole."""
        self._anew = anew
        self._file = file
        self._backend = file._device_backend
        self._direction: Final = direction
        self._buffer = buffer
        self._offset = offset
        self._events = events

    def __str__(self) -> str:
        return f"{self._direction} of {self._buffer.nbytes} bytes of device memory"

    def move(self, part: tuple[int, int]) -> int:
        """Move a part of the request, given by start and stop in bytes, completely."""
        first, last = part
        end = self._offset + last
        if self._direction == "read" and end > self._file.size_bytes:
            raise ShortReadError(
                errno.ENODATA,
                f"{self} from a file of {self._file.size_bytes}",
                self._file.path,
                offset=self._offset,
            )
        self._backend.cuda.use()
        # The compute stream has to be done with this memory: KvikIO's own streams do not know it.
        for event in self._events:
            event.synchronize()
        self._buffer.region.forget(self._events)
        if first == last:
            return 0
        done = first
        opened = None if self._anew is not None else self._file._opened(self._direction)
        if opened is not None and opened.handle is not None:
            start, stop = direct_part(
                self._offset + first, last - first, self._buffer.address + first, ALIGNMENT
            )
            if start < stop:
                self._stage(first, first + start)
                done = self._through(opened.handle, first + start, first + stop)
                self._count(opened.used.path, done - first - start)
        self._stage(done, last)
        return last - first

    def _through(self, handle: Handle, done: int, stop: int) -> int:
        """Move whole blocks with KvikIO; returns where it stopped moving any.

        A short count is gone on from; less than a block is left to the host's path, which either
        can, or gives the true reason.
        """
        start = handle.pread if self._direction == "read" else handle.pwrite
        while done < stop:
            memory = DeviceBytes(self._buffer.address + done, stop - done)
            try:
                moved = start(memory, memory.nbytes, self._offset + done).get()
            except (RuntimeError, OSError) as error:
                if is_end_of_file(error):
                    raise ShortReadError(
                        errno.ENODATA,
                        f"{self} when the file ended,",
                        self._file.path,
                        offset=self._offset,
                    ) from error
                raise storage_error(error, str(self), self._file.path, self._offset) from error
            if moved < ALIGNMENT:
                break
            done += min(whole_blocks(moved), stop - done)
        return done

    def _stage(self, first: int, last: int) -> None:
        """Move bytes `first` to `last` of the request through host memory."""
        if first == last:
            return
        staging, cuda = self._backend.staging, self._backend.cuda
        with staging.borrowed() as memory:
            for start in range(first, last, staging.nbytes - ALIGNMENT):
                nbytes = min(staging.nbytes - ALIGNMENT, last - start)
                offset = self._offset + start
                # As aligned in memory as in the file: its whole blocks bypass the page cache.
                host = memory.slice(offset % ALIGNMENT, nbytes)
                device = self._buffer.address + start
                if self._direction == "write":
                    cuda.copy(host.address, device, nbytes, "to host")
                self._file._descriptors.move(
                    self._direction,
                    host.memoryview(),
                    host.address,
                    offset,
                    self._file.path,
                    anew=self._anew,
                )
                if self._direction == "read":
                    cuda.copy(device, host.address, nbytes, "to device")
        self._count("bounce", last - first)

    def _count(self, path: DevicePath, nbytes: int) -> None:
        self._backend.count_path(self._direction, path, nbytes)


class PathCounts:
    """Bytes of device memory that took each path; all monotonic."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nbytes: Counter[tuple[Direction, DevicePath]] = Counter()

    def add(self, direction: Direction, path: DevicePath, nbytes: int) -> None:
        """Count bytes."""
        with self._lock:
            self._nbytes[direction, path] += nbytes

    def totals(self, direction: Direction) -> dict[DevicePath, int]:
        """Return bytes by path, those of no bytes included."""
        paths: tuple[DevicePath, ...] = ("gds", "compat", "bounce")
        with self._lock:
            return {path: self._nbytes[direction, path] for path in paths}
