"""Files without a name that hold gradients from their backward to their step.

The files are on the drives of the store. No checkpoint refers to them, and they are gone when the
process ends. Their space is reserved when they are made, so a full disk is an error at that time.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import uuid
from collections.abc import Iterator, Sequence

import torch

from gds import ALIGNMENT, Backend, Buffer, File, IOFuture, StorageError
from offload.format.names import is_spill_name, spill_name

_STAGE_BYTES = 4 << 20
_NUM_STAGES = 4
"""Size and number of the buffers through which gradients are written."""

_MIN_FILE_BYTES = 64 << 20


class Spill:
    """Space for gradients on the drives of a store.

    Args:
        drives: Backend and directory of each drive.
        expected_bytes: Bytes of all gradients together, if all are spilled.
    """

    def __init__(self, drives: Sequence[tuple[Backend, str]], expected_bytes: int) -> None:
        self._drives = list(drives)
        self._expected_bytes = expected_bytes
        self._files: list[list[_SpillFile]] = [[] for _ in drives]
        self._used = [0 for _ in drives]
        self._free: dict[int, list[tuple[int, _SpillFile, int]]] = {}
        self.peak_bytes = 0
        """Most bytes of gradients that have been here at once."""
        self._lock = threading.RLock()
        self._stages: list[tuple[Buffer, IOFuture | None]] = []
        self._next = 0
        self._reads: list[Buffer] = []
        self._is_closed = False
        self._process = os.getpid()

    def require_space(self) -> None:
        """Raise `StorageError` if a drive has no room for its part of the gradients."""
        share = self._share()
        for backend, directory in self._drives:
            free = backend.free_bytes(directory) if os.path.isdir(directory) else share
            if free < share:
                raise StorageError(
                    errno.ENOSPC,
                    f'gradients="drive" needs {share} bytes and {free} are free: make room, or use '
                    'gradients="host"',
                    directory,
                )

    def region(self, nbytes: int) -> Region:
        """Return a range for a gradient; its space is free again when it is not referenced."""
        size = _aligned(nbytes)
        with self._lock:
            self.require_open()
            if found := self._free.get(size):
                drive, file, start = found.pop()
            else:
                drive = min(range(len(self._drives)), key=self._used.__getitem__)
                file, start = self._take(drive, size)
            self._used[drive] += size
            self.peak_bytes = max(self.peak_bytes, sum(self._used))
        return Region(self, drive, file, start, nbytes)

    def give_back(self, drive: int, file: _SpillFile, start: int, nbytes: int) -> None:
        """Make a range free for another gradient."""
        size = _aligned(nbytes)
        with self._lock:
            self._used[drive] -= size
            self._free.setdefault(size, []).append((drive, file, start))

    def _take(self, drive: int, size: int) -> tuple[_SpillFile, int]:
        """Return a range that was never used, in a new file if no other has room."""
        files = self._files[drive]
        if not files or files[-1].left_bytes < size:
            planned = self._share() if not files else _MIN_FILE_BYTES
            files.append(_SpillFile(*self._drives[drive], max(planned, size)))
        return files[-1], files[-1].take(size)

    def _share(self) -> int:
        return _aligned(-(-self._expected_bytes // len(self._drives)))

    def write(self, file: File, data: torch.Tensor, start: int) -> list[IOFuture]:
        """Begin to write bytes in host memory; they have been copied when this returns."""
        futures = []
        with self._lock:
            self.require_open()
            for first in range(0, len(data), _STAGE_BYTES):
                part = data[first : first + _STAGE_BYTES]
                number, buffer = self._stage()
                piece = buffer.slice(0, len(part))
                _bytes_of(piece).copy_(part)
                future = file.write(piece, start + first)
                self._stages[number] = buffer, future
                futures.append(future)
        return futures

    def _stage(self) -> tuple[int, Buffer]:
        """Return a buffer whose last write has ended."""
        if len(self._stages) < _NUM_STAGES:
            self._stages.append((self._drives[0][0].allocate(_STAGE_BYTES), None))
            return len(self._stages) - 1, self._stages[-1][0]
        number, self._next = self._next, (self._next + 1) % _NUM_STAGES
        buffer, future = self._stages[number]
        if future is not None:
            _wait(future)  # its error is raised to whoever reads that gradient
        return number, buffer

    def borrow(self, nbytes: int) -> Buffer:
        """Return a buffer for a read; `give_back_buffer` takes it."""
        with self._lock:
            self.require_open()
            for number, buffer in enumerate(self._reads):
                if buffer.nbytes >= nbytes:
                    return self._reads.pop(number)
            self._reads.clear()  # all are too small
        return self._drives[0][0].allocate(_aligned(nbytes))

    def give_back_buffer(self, buffer: Buffer) -> None:
        """Take a buffer back."""
        with self._lock:
            if len(self._reads) < _NUM_STAGES:
                self._reads.append(buffer)

    def is_forked(self) -> bool:
        """Return whether this is a copy in a forked process, which has no threads of transfers."""
        return os.getpid() != self._process

    def require_open(self) -> None:
        """Raise `StorageError` if the gradients are gone, or belong to another process."""
        if self.is_forked():
            raise StorageError(
                errno.EBADF,
                "this gradient is on the drive of the process that was forked: read it there",
                "gradient",
            )
        if self._is_closed:
            raise StorageError(
                errno.EBADF,
                "the optimizer that kept this gradient on its drive is closed: call zero_grad()",
                "gradient",
            )

    def close(self) -> None:
        """Wait for writes, and free all space. Idempotent."""
        with self._lock:
            self._is_closed = True
            stages, self._stages = self._stages, []
            files, self._files = self._files, [[] for _ in self._drives]
            self._reads.clear()
            self._free.clear()
        for _, future in stages:
            if future is not None:
                _wait(future)
        for each in files:
            for file in each:
                file.file.close()


class _SpillFile:
    """One file without a name."""

    def __init__(self, backend: Backend, directory: str, nbytes: int) -> None:
        for name in filter(is_spill_name, backend.list_dir(directory)):
            backend.remove(os.path.join(directory, name))  # this process holds the store's lock
        path = os.path.join(directory, spill_name(uuid.uuid4().hex))
        self.file = backend.create(path, _aligned(nbytes))
        backend.remove(path)
        self.left_bytes = _aligned(nbytes)
        self._next = 0

    def take(self, size: int) -> int:
        """Return the start of a range that was never used."""
        start = self._next
        self._next += size
        self.left_bytes -= size
        return start


class Region:
    """The range of a file that holds one gradient."""

    def __init__(self, spill: Spill, drive: int, file: _SpillFile, start: int, nbytes: int) -> None:
        self._spill = spill
        self._drive = drive
        self._file = file
        self._start = start
        self._nbytes = nbytes
        self._futures: list[IOFuture] = []
        self._is_whole = False
        """Whether all bytes are written, or on their way."""

    def __del__(self) -> None:
        if self._spill.is_forked():
            return
        for future in self._futures:
            _wait(future)  # the next gradient in this range must not be overtaken
        self._spill.give_back(self._drive, self._file, self._start, self._nbytes)

    def write(self, values: torch.Tensor) -> None:
        """Begin to write contiguous values in host memory; they may change after this returns."""
        for future in self._futures:
            _wait(future)  # replaced: its error does not matter any more
        data = values.detach().reshape(-1).view(torch.uint8)
        if len(data) != self._nbytes:
            raise ValueError(f"a range of {self._nbytes} bytes cannot hold {len(data)}")
        with self.replacing():
            self._futures = self._spill.write(self._file.file, data, self._start)

    @contextlib.contextmanager
    def replacing(self) -> Iterator[None]:
        """Refuse reads after a block that did not end well, until the next write."""
        try:
            yield
        except BaseException:
            self._is_whole = False
            raise
        self._is_whole = True

    def settle(self) -> None:
        """Wait for the write in progress.

        Raises:
            StorageError: The gradient could not be written, or the optimizer is closed.
        """
        self._spill.require_open()
        if not self._is_whole:
            raise StorageError(
                errno.EIO,
                "a gradient was not written to the drive, because its backward was interrupted or "
                "failed: call zero_grad() and repeat the backward",
                "gradient",
            )
        for future in self._futures:
            future.result()
        self._futures = []

    def read(self, into: torch.Tensor) -> None:
        """Read all values into contiguous host memory."""
        data = into.view(-1).view(torch.uint8)
        for first in range(0, len(data), _STAGE_BYTES):
            part = data[first : first + _STAGE_BYTES]
            reading = self.begin_read(first, first + len(part))
            part.copy_(reading.wait())
            reading.release()

    @contextlib.contextmanager
    def memory(self) -> Iterator[torch.Tensor]:
        """Yield host memory for all values, as bytes."""
        buffer = self._spill.borrow(self._nbytes)
        try:
            yield _bytes_of(buffer.slice(0, self._nbytes))
        finally:
            self._spill.give_back_buffer(buffer)

    def begin_read(self, start: int, stop: int) -> Reading:
        """Begin to read some bytes of the values."""
        self.settle()
        return Reading(self._spill, self._file.file, self._start + start, stop - start)


class Reading:
    """A read in progress, with the memory that it fills."""

    def __init__(self, spill: Spill, file: File, start: int, nbytes: int) -> None:
        self._spill = spill
        pad = start % ALIGNMENT
        self._buffer: Buffer | None = spill.borrow(nbytes + pad)
        piece = self._buffer.slice(pad, nbytes)
        self._bytes = _bytes_of(piece)
        self._future = file.read(piece, start)

    def wait(self) -> torch.Tensor:
        """Return the bytes, which stay until `release`."""
        self._future.result()
        return self._bytes

    def release(self) -> None:
        """Free the memory for other reads. Idempotent."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            _wait(self._future)
            self._spill.give_back_buffer(buffer)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _bytes_of(buffer: Buffer) -> torch.Tensor:
    return torch.frombuffer(buffer.memoryview(), dtype=torch.uint8)


def _wait(future: IOFuture) -> None:
    """Wait for a transfer whose error somebody else raises."""
    with contextlib.suppress(Exception):
        future.result()
