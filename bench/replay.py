"""Replay of a step without its arithmetic: the same transfers, through as many buffers.

The replay uses only `gds`. The additional time of a streamed step is that of `offload`: computing,
digests, and all work that it fails to overlap.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import deque
from dataclasses import dataclass

from gds import ALIGNMENT, Backend, Buffer, IOFuture
from gds.kvikio import DeviceBuffer


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The bytes that a step moves."""

    num_files: int
    """Number of state arrays; each is a file."""

    array_bytes: int
    """Bytes of one array, header not counted."""

    chunk_bytes: int
    """Bytes of one array that are moved at a time; the last chunk may be shorter."""

    header_bytes: int = ALIGNMENT
    """Offset of the data in each file."""

    @property
    def file_bytes(self) -> int:
        """Size of each file."""
        return self.header_bytes + self.array_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes that a step reads; it writes as many."""
        return self.num_files * self.array_bytes

    @property
    def num_chunks(self) -> int:
        """Number of chunks of each array."""
        return -(-self.array_bytes // self.chunk_bytes)

    def byte_range(self, chunk: int) -> tuple[int, int]:
        """Return the offset of a chunk in its file, and its length, in bytes."""
        start = chunk * self.chunk_bytes
        return self.header_bytes + start, min(self.chunk_bytes, self.array_bytes - start)


def fill_random(buffer: Buffer) -> None:
    """Fill memory with data that cannot be compressed, since a drive may be faster with zeros."""
    data = random.Random(buffer.nbytes).randbytes(buffer.nbytes)
    if isinstance(buffer, DeviceBuffer):
        buffer.upload(data)
    else:
        buffer.memoryview()[:] = data


class _Frame:
    """Memory for one chunk of every array."""

    def __init__(self, backend: Backend, plan: Plan) -> None:
        self.buffers: list[Buffer] = [
            backend.allocate(plan.chunk_bytes) for _ in range(plan.num_files)
        ]
        self.futures: list[IOFuture] = []


class Replay:
    """Loop that reads every chunk of all files and writes it back, `ring_chunks` chunks at a time.

    The order is that of `offload.stream.streamer`. Reads run ahead as far as there are free frames,
    also into the next pass. A chunk is written when it has been read, and is not read again before
    that write has ended.

    Args:
        backend: Backend that moves the bytes between files and memory that it allocates.
        directory: Directory in which the files are made; they are written in full once.
        plan: Bytes to move.
        ring_chunks: Number of frames.
    """

    def __init__(self, backend: Backend, directory: str, plan: Plan, ring_chunks: int) -> None:
        self.plan = plan
        self.names = [f"array-{number}.bin" for number in range(plan.num_files)]
        self._files = [
            backend.create(os.path.join(directory, name), plan.file_bytes) for name in self.names
        ]
        self._free = [
            _Frame(backend, plan) for _ in range(max(1, min(ring_chunks, plan.num_chunks)))
        ]
        self._changed = threading.Condition(threading.RLock())
        self._loading: dict[int, _Frame] = {}
        self._writing: set[int] = set()
        self._ahead: deque[int] = deque()
        self._error: BaseException | None = None
        self._fill()

    def run(self, passes: int) -> float:
        """Move all bytes `passes` times, and return the seconds of one pass.

        The run begins and ends with nothing in flight and the ring full of the next chunks, as
        between two calls of ``optimizer.synchronize()``.
        """
        if not self._loading:
            self._read_ahead()
        self._synchronize()
        started = time.perf_counter()
        for _ in range(passes):
            for chunk in range(self.plan.num_chunks):
                self._write(chunk, self._take(chunk))
            self._read_ahead()
        self._synchronize()
        return (time.perf_counter() - started) / passes

    def close(self) -> None:
        """Wait for transfers in flight, and close the files."""
        for file in self._files:
            file.close()

    def _fill(self) -> None:
        """Write every byte once, since the first write to reserved space costs more than others."""
        frame = self._free[0]
        fill_random(frame.buffers[0])
        for file in self._files:
            header = min(frame.buffers[0].nbytes, self.plan.header_bytes)
            file.write(frame.buffers[0].slice(0, header), 0).result()
            for chunk in range(self.plan.num_chunks):
                offset, nbytes = self.plan.byte_range(chunk)
                file.write(frame.buffers[0].slice(0, nbytes), offset).result()
            file.sync()

    def _read_ahead(self) -> None:
        with self._changed:
            self._ahead.extend(range(self.plan.num_chunks))
            self._pump()

    def _take(self, chunk: int) -> _Frame:
        with self._changed:
            while chunk not in self._loading:
                self._raise_error()
                self._changed.wait()
            frame = self._loading.pop(chunk)
        for future in frame.futures:
            future.result()
        return frame

    def _write(self, chunk: int, frame: _Frame) -> None:
        with self._changed:
            self._writing.add(chunk)
        remaining = len(self._files)
        offset, nbytes = self.plan.byte_range(chunk)

        def ended(future: IOFuture) -> None:
            """Note the end of a write, and free the frame after the last one."""
            nonlocal remaining
            with self._changed:
                try:
                    future.result()
                except BaseException as error:  # noqa: BLE001  (raised by the waiting thread)
                    self._error = self._error or error
                remaining -= 1
                if remaining == 0:
                    self._writing.discard(chunk)
                    self._free.append(frame)
                    self._pump()

        for file, buffer in zip(self._files, frame.buffers, strict=True):
            file.write(buffer.slice(0, nbytes), offset).add_done_callback(ended)

    def _pump(self) -> None:
        """Start reads as long as there are chunks to read and free frames."""
        while self._ahead and self._free and self._ahead[0] not in self._writing:
            chunk, frame = self._ahead.popleft(), self._free.pop()
            offset, nbytes = self.plan.byte_range(chunk)
            frame.futures = [
                file.read(buffer.slice(0, nbytes), offset)
                for file, buffer in zip(self._files, frame.buffers, strict=True)
            ]
            self._loading[chunk] = frame
        self._changed.notify_all()

    def _synchronize(self) -> None:
        with self._changed:
            while self._writing:
                self._changed.wait()
            loading = [future for frame in self._loading.values() for future in frame.futures]
        for future in loading:
            future.result()
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
