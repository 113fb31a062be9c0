"""Open file of the KvikIO backend. It decides which handle moves each part of a request."""
# ruff: noqa: D102 - the protocols of `gds.contract` document the methods

from __future__ import annotations

import errno
import threading
from functools import partial
from typing import Final, NamedTuple, Protocol, TypeAlias

from gds.backends.hybrid import Direction, Mode
from gds.backends.kvikio_library import (
    CompatibilityMode,
    PlainCalls,
    is_end_of_file,
    storage_error,
)
from gds.backends.posix_file import PosixFile, Transfers
from gds.backends.threads import Part
from gds.backends.transfer import Descriptors, cut, direct_part
from gds.buffers.cuda import Cuda, Event
from gds.buffers.device import DeviceBuffer
from gds.buffers.host import HostBuffer
from gds.buffers.pool import BufferPool
from gds.contract import ALIGNMENT, Buffer
from gds.errors import ShortReadError
from gds.paths import DevicePath


class Used(NamedTuple):
    """The path of device memory in one direction, with the reason."""

    path: DevicePath
    reason: str
    """Reason, for people, why the path is not GPUDirect Storage; empty if it is."""


Mover: TypeAlias = PlainCalls | CompatibilityMode
"""One open file, as a library moves device memory to it and from it."""


class Opened(NamedTuple):
    """The path of an open file in one direction, and its handle; None if the path needs none."""

    used: Used
    handle: Mover | None


Handles: TypeAlias = dict[Direction, Opened]
"""Path and handle of an open file, by direction."""


_abandoned: list[Handles] = []
"""Handles of a parent process. Closing them in a forked child would call the parent's driver."""


class DeviceTransfers(Transfers, Protocol):
    """What a file needs of its backend for device memory; `KvikioBackend` has it."""

    cuda: Cuda
    staging: BufferPool[HostBuffer]

    @property
    def device_request_bytes(self) -> int | None: ...

    def open_handles(self, path: str, fd: int, *, writable: bool) -> Handles: ...

    def count_path(self, direction: Direction, path: DevicePath, nbytes: int) -> None: ...


class KvikioFile(PosixFile):
    """An open file of a `KvikioBackend`.

    Host memory takes the POSIX path. For device memory the file may be opened once more, by cuFile
    or KvikIO; this happens only at the first transfer, because most small files never have one.
    Whole blocks whose memory is aligned like their place in the file then go through that handle.
    The rest, and everything on the path ``bounce``, is copied through page-locked host memory. So
    cuFile never reads, changes and writes back a block while a neighbouring block is being written.
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
        """Return the path that whole blocks of device memory take, and why no better one works.

        The first call may take seconds, because it examines the path and opens the file.

        Raises:
            StorageError: The file is closed, or it cannot have the path that the backend demands.
        """
        self._check(direction, 0)
        return self._opened(direction).used

    def close(self) -> None:
        super().close()
        if self._device_backend.forked():
            if self._handles:
                _abandoned.append(self._handles)
            return
        with self._opening:
            handles, self._handles = self._handles, None
        for opened in (handles or {}).values():
            if opened.handle is not None:
                opened.handle.close()

    def _moves(
        self, direction: Direction, buffer: Buffer, offset: int, uncached_mode: Mode | None
    ) -> list[Part]:
        if not isinstance(buffer, DeviceBuffer):
            return super()._moves(direction, buffer, offset, uncached_mode)
        events = buffer.region.events(buffer.address, buffer.address + buffer.nbytes)
        transfer = _DeviceTransfer(self, direction, buffer, offset, events, uncached_mode)
        parts = cut(offset, buffer.nbytes, self._device_backend.device_request_bytes)
        return [partial(transfer.move, part) for part in parts]

    def _opened(self, direction: Direction) -> Opened:
        """Return path and handle of a direction; the first call opens the handles."""
        with self._opening:
            if self._handles is None:
                self._handles = self._device_backend.open_handles(
                    self.path, self._descriptors.buffered_fd, writable=self._writable
                )
            return self._handles[direction]


class _DeviceTransfer:
    """One request for device memory. It keeps buffer and file alive, which no library does."""

    def __init__(
        self,
        file: KvikioFile,
        direction: Direction,
        buffer: DeviceBuffer,
        offset: int,
        events: list[Event],
        uncached_mode: Mode | None,
    ) -> None:
        self._uncached_mode = uncached_mode
        self._file = file
        self._backend = file._device_backend
        self._direction: Final = direction
        self._buffer = buffer
        self._offset = offset
        self._events = events

    def __str__(self) -> str:
        return f"{self._direction} of {self._buffer.nbytes} bytes of device memory"

    def move(self, part: tuple[int, int]) -> int:
        """Move a part of the request completely, and return its length in bytes."""
        try:
            return self._move(*part)
        except RuntimeError as error:  # of CUDA; those of files are StorageError already
            raise storage_error(error, str(self), self._file.path, self._offset) from error

    def _move(self, first: int, last: int) -> int:
        end = self._offset + last
        if self._direction == "read" and end > self._file.size_bytes:
            raise ShortReadError(
                errno.ENODATA,
                f"{self} from a file of {self._file.size_bytes} bytes",
                self._file.path,
                offset=self._offset,
            )
        self._backend.cuda.use()
        # No transfer waits for compute streams that still use this memory.
        for event in self._events:
            event.synchronize()
        self._buffer.region.forget(self._events)
        if first == last:
            return 0
        done = first
        opened = None if self._uncached_mode is not None else self._file._opened(self._direction)
        if opened is not None and opened.handle is not None:
            start, stop = direct_part(
                self._offset + first, last - first, self._buffer.address + first, ALIGNMENT
            )
            if start < stop:
                self._stage(first, first + start)
                done = self._through(opened.handle, first + start, first + stop)
                moved = done - first - start
                self._backend.count_path(self._direction, opened.used.path, moved)
        self._stage(done, last)
        return last - first

    def _through(self, handle: Mover, done: int, stop: int) -> int:
        """Move whole blocks with a library, and return the position that it has reached.

        After a short count, the transfer continues. If the library moves less than a block, the
        caller moves the rest through host memory, which succeeds or gives the true error.
        """
        while done < stop:
            memory = self._buffer.slice(done, stop - done)
            try:
                moved = handle.move(self._direction, memory, self._offset + done)
            except (RuntimeError, OSError) as error:
                if is_end_of_file(error):
                    raise ShortReadError(
                        errno.ENODATA,
                        f"{self} before the file ended,",
                        self._file.path,
                        offset=self._offset,
                    ) from error
                raise storage_error(error, str(self), self._file.path, self._offset) from error
            if moved < ALIGNMENT:
                break
            done += min(moved // ALIGNMENT * ALIGNMENT, stop - done)  # the rest stays aligned
        return done

    def _stage(self, first: int, last: int) -> None:
        """Copy a part through host memory."""
        if first == last:
            return
        staging, cuda = self._backend.staging, self._backend.cuda
        with staging.borrowed() as memory:
            for start in range(first, last, staging.nbytes - ALIGNMENT):
                nbytes = min(staging.nbytes - ALIGNMENT, last - start)
                offset = self._offset + start
                # The copy is aligned in memory as in the file, so that whole blocks bypass the page
                # cache.
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
                    uncached_mode=self._uncached_mode,
                )
                if self._direction == "read":
                    cuda.copy(device, host.address, nbytes, "to device")
        self._backend.count_path(self._direction, "bounce", last - first)
