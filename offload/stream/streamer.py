"""Chunks of state on their way from the drive through memory and back.

A fixed ring of frames, each with room for one chunk of every state array. The life of a frame:

    free -> loading (reads in progress) -> taken (being updated) -> writing -> free

Reads run ahead of the update as far as there are free frames; writes trail behind it. Whenever a
frame becomes free, on whichever thread that happens, the next read is started, so that the ring
refills for the next step while the model computes. A chunk is not read again before its write has
ended. Memory is the ring, and never depends on the model.

Beside the ring, a budget of memory may hold some chunks between steps. Each of those has a frame
to itself, which is read once and written by a seal only:

    loading -> held -> taken -> held, dirty -> writing (a seal's flush) -> held

Which chunks they are is decided once, evenly spread, so that a pass over all chunks finds the same
ones every time, and has some to work on while the drive reads the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from gds import IOFuture
from gds.waiting import Monitor
from offload.format.digests import Run, one_by_one
from offload.format.layout import Layout
from offload.store.slot import Slot
from offload.stream.frame import Frame, FrameMemory, frame_bytes
from offload.stream.meter import Meter
from offload.stream.read_check import check_read


class Streamer:
    """Moves chunks between slots and frames; one per optimizer, used by the training thread.

    Args:
        memory: Of the frames.
        layout: The target's layout; its chunks are what is streamed.
        ring_chunks: Most frames to have; fewer are made if there are fewer chunks.
        meter: Counts the seconds that `take` waits.
        resident_bytes: What chunks that stay in memory may take together.
        verify_reads: Compare every chunk that is read with its digest.
    """

    def __init__(
        self,
        memory: FrameMemory,
        layout: Layout,
        ring_chunks: int,
        meter: Meter,
        *,
        resident_bytes: int = 0,
        verify_reads: bool = False,
    ) -> None:
        self.layout = layout
        self._verify_reads = verify_reads
        nbytes = frame_bytes(layout)
        resident = _spread(resident_bytes // nbytes if nbytes else 0, layout)
        self._resident = {chunk: Frame(memory, layout) for chunk in resident}
        num_frames = min(ring_chunks, layout.num_chunks - len(resident))
        self._frames = [Frame(memory, layout) for _ in range(num_frames)]
        """All of the ring."""
        self._free = [*self._frames]
        self._num_frames = num_frames
        self.ring_bytes = nbytes * num_frames
        self.resident_bytes = nbytes * len(resident)
        self._held: set[int] = set()
        """Resident chunks whose memory is the state."""
        self._dirty: set[int] = set()
        """Those of them that the present target has not got."""
        self._flushing: set[int] = set()
        """Those of them that a seal is about to write; they must not change."""
        self._changed = Monitor()
        self._source: Slot | None = None
        self._queue: deque[int] = deque()
        self._loading: dict[int, Frame] = {}
        self._writing: dict[int, Frame] = {}
        self._dropping: list[Frame] = []
        """Frames of what has been given up, in which reads may be in progress."""
        self._error: Exception | None = None
        self._meter = meter

    def begin(self, source: Slot | None, chunks: Sequence[int]) -> None:
        """Say which chunks will be taken next, in which order, and where they are read from.

        What has been read ahead from the same source is kept, if it is among the next to be taken:
        anything else could fill the ring with chunks that are of no use until others have passed.
        """
        with self._changed:
            self._queue.clear()
            wanted: set[int] = set()
            if source is self._source:
                wanted = {c for c in chunks if c in self._resident}
                wanted.update([c for c in chunks if c not in wanted][: self._num_frames])
            for chunk in [c for c in self._loading if c not in wanted]:
                self._drop(chunk)
            self._source = source
            self._queue.extend(c for c in chunks if c not in self._loading and c not in self._held)
            self._pump()

    def take(self, chunk: int) -> Frame:
        """Wait until a chunk has been read and return its frame, which the caller then owns.

        Raises:
            gds.StorageError: The read failed, or an earlier write did.
            DamagedError: What was read is not what was written: in the first pass over a restored
                checkpoint, or in any with `verify_reads`.
        """
        # A frame that is not loading yet waits for writes, which hold all others.
        with self._meter.timed("wait_write_s", chunk=chunk):
            frame = self._changed.wait_until(partial(self._give, chunk))
        if chunk in self._held:
            return frame
        try:
            with self._meter.timed("wait_read_s", chunk=chunk):
                for future in frame.futures:
                    future.result()
                source = self._source
                if source is not None and (source.unchecked or self._verify_reads):
                    check_read(frame, source)
        except BaseException:
            with self._changed:
                self._release(frame)
            raise
        if chunk not in self._resident:
            frame.digests = frame.new_digests()
        return frame

    def _give(self, chunk: int) -> Frame | None:
        """Return the frame of a chunk that is being read or is in memory; None if neither yet."""
        self.raise_error()
        if chunk in self._loading or self._is_idle(chunk):
            return self._loading.pop(chunk, None) or self._resident[chunk]
        if chunk not in self._queue and chunk not in self._held:
            raise RuntimeError(f"chunk {chunk} is taken, but begin() did not name it")
        return None

    def put(self, frame: Frame, target: Slot, run: Run = one_by_one) -> None:
        """Digest a frame's chunk and start writing it; the frame comes back when that has ended.

        What `Frame.digests` was told of has been digested before.

        A resident chunk stays, and is written by the next `Flush`.

        Args:
            frame: From `take`.
            target: Where to.
            run: Spreads the remaining digests over threads.
        """
        if frame.chunk in self._resident:
            with self._changed:
                self.raise_error()
                self._held.add(frame.chunk)
                self._dirty.add(frame.chunk)
            return
        self._write(frame, target, run)

    def _write(self, frame: Frame, target: Slot, run: Run) -> None:
        chunk = frame.chunk
        try:
            self.raise_error()
            transfers = frame.buffers(self.layout, chunk)
            digests = frame.digests or frame.new_digests()
            frame.digests = None
            for name, digest in digests.finish(target.context, chunk, run).items():
                target.digests[name][chunk] = digest
            transfers = [transfer for transfer in transfers if transfer[1].nbytes]
        except BaseException:
            self.discard(frame)
            raise
        frame.futures = []
        try:
            self._writing[chunk] = frame
            for name, buffer, offset in transfers:
                frame.futures.append(target.array(name, chunk).write(buffer, offset))
        except Exception as error:
            with self._changed:
                self._error = self._error or error
            raise
        finally:
            self._when_ended(frame.futures, partial(self._written, frame))

    def discard(self, frame: Frame) -> None:
        """Give back a taken frame without writing it; what it holds is lost."""
        with self._changed:
            self._release(frame)
            self._pump()

    def keep(self, frame: Frame) -> None:
        """Give back a taken frame that has not been changed: a resident chunk stays as it is."""
        frame.digests = None
        with self._changed:
            if self._resident.get(frame.chunk) is frame:
                self._held.add(frame.chunk)
            else:
                self._free.append(frame)
            self._pump()

    def flush(self) -> Flush:
        """Return what a seal of the present target must see through; dirty chunks freeze now.

        Raises:
            gds.StorageError: A write before has failed.
        """
        with self._changed:
            self.raise_error()
            pending = [f for frame in self._writing.values() for f in frame.futures]
            self._flushing, self._dirty = self._dirty, set()
            return Flush(self, pending, sorted(self._flushing))

    def thaw(self) -> None:
        """Let what `flush` has frozen change again: nothing of it has been written."""
        with self._changed:
            self._dirty |= self._flushing
            self._flushing.clear()
            self._changed.notify_all()

    def synchronize(self) -> None:
        """Wait until every transfer that has been started has ended.

        Raises:
            gds.StorageError: A write failed.
        """
        self._changed.wait_until(lambda: not (self._writing or self._dropping))
        with self._changed:
            loading = [f for frame in self._loading.values() for f in frame.futures]
        for future in loading:
            _wait(future)
        self.raise_error()

    def reset(self) -> None:
        """Wait for all transfers, then forget what was read ahead and what failed.

        Also what nobody has taken note of, because an interrupt came in between.
        """
        with self._changed:
            self._queue.clear()
        # All, and not only those that are known to be in use.
        resident = list(self._resident.values())
        for frame in (*self._frames, *resident):
            for future in frame.futures:
                _wait(future)
        with self._changed:
            for known in (self._loading, self._writing, self._dropping):
                known.clear()
            for chunks in (self._held, self._dirty, self._flushing):
                chunks.clear()
            self._free = [*self._frames]
            for frame in (*self._frames, *resident):
                frame.futures = []  # what they call refers to this: the cycle would keep memory
            self._source = None
            self._error = None

    @property
    def error(self) -> Exception | None:
        """The first transfer that failed since the last `reset`: the working slot is torn."""
        return self._error

    def raise_error(self) -> None:
        """Raise the error of a transfer that failed, if one has."""
        if self._error is not None:
            raise self._error

    def _is_idle(self, chunk: int) -> bool:
        """Return whether a chunk is in memory and no seal needs it as it is."""
        busy = chunk in self._flushing or chunk in self._writing
        return chunk in self._held and not busy

    def _release(self, frame: Frame) -> None:
        """Take back a frame whose content is not the state, or is on its way to storage."""
        frame.digests = None
        if self._resident.get(frame.chunk) is frame:
            self._held.discard(frame.chunk)
        else:
            self._free.append(frame)

    def _when_ended(self, futures: Sequence[IOFuture], action: Callable[[], None]) -> None:
        """Do something once, under the lock, when transfers have ended; at once if they have.

        If the caller is interrupted, it waits for them, so that it is done in any case.

        Args:
            futures: Of the transfers.
            action: May be begun again, if it is interrupted itself.
        """
        left = set(range(len(futures)))
        is_done = False

        def ended(numbers: Iterable[int]) -> None:
            nonlocal is_done
            with self._changed:
                left.difference_update(numbers)
                if not left and not is_done:
                    action()
                    is_done = True

        try:
            for number, future in enumerate(futures):
                future.add_done_callback(partial(lambda number, _: ended([number]), number))
            ended([])
        except BaseException:
            for future in futures:
                _wait(future)
            ended(list(left))
            raise

    def _written(self, frame: Frame) -> None:
        """Take back a frame whose writes have ended, or could not all be begun."""
        for future in frame.futures:
            self._error = self._error or _error_of(future)
        if self._writing.get(frame.chunk) is not frame:
            return
        del self._writing[frame.chunk]
        if frame.chunk in self._resident:
            self._flushing.discard(frame.chunk)
        else:
            self._free.append(frame)
        self._pump()
        self._changed.notify_all()

    def _drop(self, chunk: int) -> None:
        """Give up a chunk that was read ahead; its frame is free once the reads have ended."""
        self._drop_frame(self._loading.pop(chunk))

    def _drop_frame(self, frame: Frame) -> None:
        self._dropping.append(frame)
        self._when_ended(frame.futures, partial(self._dropped, frame))

    def _dropped(self, frame: Frame) -> None:
        if frame in self._dropping:
            self._dropping.remove(frame)
            self._release(frame)
            self._pump()

    def _pump(self) -> None:
        """Start reads while there are chunks to read and frames to read into.

        What goes wrong is raised where the chunk is taken: this may be a transfer's thread.
        """
        while self._queue and self._error is None:
            chunk = self._queue[0]
            if chunk in self._writing:
                break  # the end of that write comes back here
            if chunk not in self._resident and not self._free:
                break
            self._queue.popleft()
            frame = self._resident.get(chunk) or self._free.pop()
            frame.chunk, frame.futures = chunk, []
            try:
                self._read(frame, chunk)
                self._loading[chunk] = frame
            except BaseException as error:
                self._drop_frame(frame)
                if not isinstance(error, Exception):
                    raise  # an interrupt, of this thread's caller
                self._error = error
                break
        self._changed.notify_all()

    def _read(self, frame: Frame, chunk: int) -> None:
        """Start the reads of a chunk; the frame knows those that have been started."""
        source = self._source
        if source is None or chunk >= source.layout.num_chunks:
            return
        for name, buffer, offset in frame.buffers(source.layout, chunk):
            if source.digests[name][chunk] is None:
                continue  # it was never written: no parameter in it has state
            if buffer.nbytes:
                frame.futures.append(source.array(name, chunk).read(buffer, offset))


class Flush:
    """Everything of the state that is not on storage yet when a checkpoint is asked for.

    Args:
        streamer: Made by its `flush`.
        pending: Writes that are in progress.
        chunks: Resident chunks to write.
    """

    def __init__(
        self, streamer: Streamer, pending: Sequence[IOFuture], chunks: Sequence[int]
    ) -> None:
        self._streamer = streamer
        self._pending = list(pending)
        self._chunks = deque(chunks)

    def start(self, target: Slot) -> None:
        """Digest the resident chunks and start writing them, each free to change once written."""
        while self._chunks:
            frame = self._streamer._resident[self._chunks[0]]
            self._streamer._write(frame, target, one_by_one)  # the pool is training's
            self._pending += frame.futures
            self._chunks.popleft()

    def wait(self) -> None:
        """Wait until everything has been written.

        Raises:
            gds.StorageError: Something has not.
        """
        for write in self._pending:
            write.result()

    def abandon(self) -> None:
        """Let what has not been started stay in memory only, for a later seal."""
        streamer = self._streamer
        with streamer._changed:
            streamer._flushing.difference_update(self._chunks)
            streamer._dirty.update(self._chunks)
            streamer._changed.notify_all()


def _spread(num: int, layout: Layout) -> list[int]:
    """Choose that many of a layout's chunks, or all, evenly."""
    total = layout.num_chunks
    num = min(num, total)
    return [c for c in range(total) if (c + 1) * num // total > c * num // total]


def _error_of(future: IOFuture) -> Exception | None:
    """Wait for a transfer and return its error; an interrupt of the wait is raised."""
    try:
        future.result()
    except Exception as error:  # noqa: BLE001  (returned, and raised where it is waited for)
        return error
    return None


def _wait(future: IOFuture) -> None:
    # The content is not wanted any more; a later read of the same place reports what is wrong.
    _error_of(future)
