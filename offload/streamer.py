"""Chunks of state on their way from the drive through memory and back.

A fixed ring of frames, each with room for one chunk of every state array. The life of a frame:

    free -> loading (reads in progress) -> taken (being updated) -> writing -> free

Reads run ahead of the update as far as there are free frames; writes trail behind it. Whenever a
frame becomes free, on whichever thread that happens, the next read is started, so that the ring
refills for the next step while the model computes. A chunk is not read again before its write has
ended. Memory is the ring, and never depends on the model.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

import torch

from gds import ALIGNMENT, Backend, Buffer, IOFuture
from offload.errors import CheckpointError
from offload.layout import Layout
from offload.slot import Slot


class Frame:
    """Memory for one chunk of every state array."""

    def __init__(self, backend: Backend, layout: Layout) -> None:
        self._buffers: dict[str, Buffer] = {}
        self._bytes: dict[str, torch.Tensor] = {}
        for name in layout.array_names:
            # A range that starts inside a 4 KiB block is kept at the same position inside a block
            # of memory, so that its aligned part can still be transferred directly.
            nbytes = layout.max_chunk_bytes(name) + ALIGNMENT
            buffer = backend.allocate(nbytes)
            self._buffers[name] = buffer
            self._bytes[name] = torch.frombuffer(buffer.memoryview(), dtype=torch.uint8)
        self.chunk = -1
        self.futures: list[IOFuture] = []

    @property
    def nbytes(self) -> int:
        """Bytes of memory, all arrays together."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def buffer(self, layout: Layout, array: str, chunk: int) -> tuple[Buffer, int]:
        """Return the memory for a chunk of an array, and its offset in the array's file."""
        offset, nbytes = layout.byte_range(array, chunk)
        return self._buffers[array].slice(offset % ALIGNMENT, nbytes), offset

    def tensors(self, layout: Layout) -> dict[str, torch.Tensor]:
        """Return the present chunk as one FP32 tensor per state array."""
        out = {}
        for name, data in self._bytes.items():
            offset, nbytes = layout.byte_range(name, self.chunk)
            pad = offset % ALIGNMENT
            out[name] = data[pad : pad + nbytes].view(torch.float32)
        return out


class Streamer:
    """Moves chunks between slots and frames; one per optimizer, used by the training thread.

    Args:
        backend: Allocates the memory.
        layout: The target's layout; its chunks are what is streamed.
        ring_chunks: Most frames to have; fewer are made if there are fewer chunks.
    """

    def __init__(self, backend: Backend, layout: Layout, ring_chunks: int) -> None:
        self.layout = layout
        num_frames = min(ring_chunks, layout.num_chunks) if layout.array_names else 1
        self._free = [Frame(backend, layout) for _ in range(max(num_frames, 1))]
        self.ring_bytes = sum(frame.nbytes for frame in self._free)
        self._changed = threading.Condition(threading.RLock())
        self._source: Slot | None = None
        self._queue: deque[int] = deque()
        self._loading: dict[int, Frame] = {}
        self._writing: dict[int, Frame] = {}
        self._dropping = 0
        self._error: BaseException | None = None
        self.wait_read_s = 0.0
        self.wait_write_s = 0.0

    def begin(self, source: Slot | None, chunks: Sequence[int]) -> None:
        """Say which chunks will be taken next, in which order, and where they are read from.

        What has been read ahead from the same source is kept.
        """
        with self._changed:
            self._queue.clear()
            wanted = set(chunks) if source is self._source else set()
            for chunk in [c for c in self._loading if c not in wanted]:
                self._drop(chunk)
            self._source = source
            self._queue.extend(c for c in chunks if c not in self._loading)
            self._pump()

    def take(self, chunk: int) -> Frame:
        """Wait until a chunk has been read and return its frame, which the caller then owns.

        Raises:
            gds.StorageError: The read failed, or an earlier write did.
            CheckpointError: The first pass over a restored checkpoint found it damaged.
        """
        started = time.perf_counter()
        with self._changed:
            while chunk not in self._loading:
                self.raise_error()
                if chunk not in self._queue:
                    raise RuntimeError(f"chunk {chunk} is taken, but begin() did not name it")
                self._changed.wait()
            frame = self._loading.pop(chunk)
        waited = time.perf_counter()
        self.wait_write_s += waited - started  # no frame was free: writes were holding them
        try:
            for future in frame.futures:
                future.result()
            self._check(frame)
        except BaseException:
            with self._changed:
                self._free.append(frame)
            raise
        self.wait_read_s += time.perf_counter() - waited
        return frame

    def put(self, frame: Frame, target: Slot) -> None:
        """Digest a frame's chunk and start writing it; the frame comes back when that has ended."""
        chunk = frame.chunk
        transfers = []
        try:
            self.raise_error()
            for name in self.layout.array_names:
                buffer, offset = frame.buffer(self.layout, name, chunk)
                digest = target.context.digest(name, chunk, buffer.memoryview())
                target.digests[name][chunk] = digest
                if buffer.nbytes:
                    transfers.append((name, buffer, offset))
        except BaseException:
            self.discard(frame)
            raise
        frame.futures = []
        with self._changed:
            self._writing[chunk] = frame
        remaining = len(transfers)

        def ended(error: BaseException | None, num: int) -> None:
            nonlocal remaining
            with self._changed:
                self._error = self._error or error
                remaining -= num
                if remaining == 0:
                    self._written(frame)

        if not transfers:
            ended(None, 0)
        for position, (name, buffer, offset) in enumerate(transfers):
            try:
                future = target.array(name).write(buffer, offset)
            except BaseException as error:
                ended(error, len(transfers) - position)
                raise
            frame.futures.append(future)
            future.add_done_callback(lambda future: ended(_error_of(future), 1))

    def _check(self, frame: Frame) -> None:
        """Compare what was read from a checkpoint of an earlier process with its digests."""
        source = self._source
        if source is None or not source.unchecked or not frame.futures:
            return
        for name in source.layout.array_names:
            expected = source.digests[name][frame.chunk]
            buffer, offset = frame.buffer(source.layout, name, frame.chunk)
            if expected is None:
                continue
            found = source.context.digest(name, frame.chunk, buffer.memoryview())
            if found != expected:
                raise CheckpointError(
                    f"{source.array(name).path}: bytes {offset} to {offset + buffer.nbytes} are "
                    f"damaged: their digest is {found}, expected {expected}. Go back to an older "
                    "checkpoint: restore(<step>, discard_newer=True)."
                )

    def discard(self, frame: Frame) -> None:
        """Give back a taken frame without writing it."""
        with self._changed:
            self._free.append(frame)
            self._pump()

    def pending_writes(self) -> list[IOFuture]:
        """Return the writes that are in progress now; all before them have succeeded.

        Raises:
            gds.StorageError: One has not.
        """
        with self._changed:
            self.raise_error()
            return [f for frame in self._writing.values() for f in frame.futures]

    def synchronize(self) -> None:
        """Wait until every transfer that has been started has ended.

        Raises:
            gds.StorageError: A write failed.
        """
        with self._changed:
            while self._writing:
                self._changed.wait()
            loading = [f for frame in self._loading.values() for f in frame.futures]
        for future in loading:
            _wait(future)
        self.raise_error()

    def reset(self) -> None:
        """Wait for all transfers, then forget what was read ahead and what failed."""
        with self._changed:
            self._queue.clear()
            for chunk in list(self._loading):
                self._drop(chunk)
            while self._writing or self._dropping:
                self._changed.wait()
            self._source = None
            self._error = None

    @property
    def error(self) -> BaseException | None:
        """The first transfer that failed since the last `reset`: the working slot is torn."""
        return self._error

    def raise_error(self) -> None:
        """Raise the error of a transfer that failed, if one has."""
        if self._error is not None:
            raise self._error

    def _written(self, frame: Frame) -> None:
        del self._writing[frame.chunk]
        self._free.append(frame)
        self._pump()
        self._changed.notify_all()

    def _drop(self, chunk: int) -> None:
        """Give up a chunk that was read ahead; its frame is free once the reads have ended."""
        frame = self._loading.pop(chunk)
        remaining = len(frame.futures)
        self._dropping += 1

        def ended(num: int) -> None:
            nonlocal remaining
            with self._changed:
                remaining -= num
                if remaining == 0:
                    self._dropping -= 1
                    self._free.append(frame)
                    self._pump()

        if not frame.futures:
            ended(0)
        for future in frame.futures:
            future.add_done_callback(lambda _: ended(1))

    def _pump(self) -> None:
        """Start reads while there are chunks to read and frames to read into."""
        while self._queue and self._free and self._error is None:
            chunk = self._queue[0]
            if chunk in self._writing:
                break  # the end of that write comes back here
            self._queue.popleft()
            frame = self._free.pop()
            frame.chunk = chunk
            try:
                frame.futures = self._read(frame, chunk)
            except BaseException as error:  # noqa: BLE001  (this may be a transfer's thread)
                self._free.append(frame)
                self._error = error
                break
            self._loading[chunk] = frame
        self._changed.notify_all()

    def _read(self, frame: Frame, chunk: int) -> list[IOFuture]:
        source = self._source
        if source is None or chunk >= source.layout.num_chunks:
            return []
        futures = []
        for name in source.layout.array_names:
            if source.digests[name][chunk] is None:
                continue  # it was never written: no parameter in it has state
            buffer, offset = frame.buffer(source.layout, name, chunk)
            if buffer.nbytes:
                futures.append(source.array(name).read(buffer, offset))
        return futures


def _error_of(future: IOFuture) -> BaseException | None:
    try:
        future.result()
    except BaseException as error:  # noqa: BLE001  (returned, and raised where it is waited for)
        return error
    return None


def _wait(future: IOFuture) -> None:
    # The content is not wanted any more; a later read of the same place reports what is wrong.
    _error_of(future)
