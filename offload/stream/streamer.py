"""Streamer of chunks: from the drives through memory and back.

A ring has a fixed number of frames, each for one chunk of every state array. Reads run ahead, and
the next read starts when a frame becomes free, on any thread. A budget of memory may hold resident
chunks besides, evenly spread, which are written only by seals. The life of a frame:

    free -> loading (reads in progress) -> taken (being updated) -> writing -> free
    loading -> held -> taken -> held, dirty -> writing (a seal's flush) -> held      (resident)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import cast

from gds import IOFuture
from gds.waiting import Monitor
from offload.checkpoint.recut.source import RecutSource
from offload.checkpoint.sealed_slot import SlotFiles
from offload.format.digests import Run, one_by_one
from offload.format.layout import Layout
from offload.format.model_places import ModelPlaces
from offload.store.slots.slot import OpenSlot
from offload.stream.frame import (
    Frame,
    FrameMemory,
    allocate_frames,
    check_read,
    frame_bytes,
    frames_bytes,
)
from offload.stream.meter import Meter


class Streamer:
    """Moves chunks between slots and frames; one per optimizer, used by the training thread.

    Args:
        memory: Memory of the frames.
        layout: Layout of the target, whose chunks are streamed.
        ring_chunks: Maximal number of frames in the ring; fewer are created for fewer chunks.
        meter: Meter that counts the seconds that `take` waits.
        resident_bytes: Memory for all resident chunks together, in bytes.
        resident_memory: Memory of the resident chunks; None for that of the other frames.
        verify_reads: Whether every chunk that is read is compared with its digest.
        places: Places of the chunks' parameters in the model file, if they are written together
            with the state; None if only seals write them. Those of resident chunks are left to
            seals, as their state is.
        reads_model: Whether parameters are also read together with the state, because some of them
            are nowhere else.
    """

    def __init__(
        self,
        memory: FrameMemory,
        layout: Layout,
        ring_chunks: int,
        meter: Meter,
        *,
        resident_bytes: int = 0,
        resident_memory: FrameMemory | None = None,
        verify_reads: bool = False,
        places: ModelPlaces | None = None,
        reads_model: bool = False,
    ) -> None:
        self.layout = layout
        self.writes_model = places is not None
        self.reads_model = reads_model
        self._verify_reads = verify_reads
        nbytes = frame_bytes(layout)
        kept_in = memory if resident_memory is None else resident_memory
        most = min(resident_bytes // nbytes if nbytes else 0, layout.num_chunks)
        while most and frames_bytes(kept_in, layout, most) > resident_bytes:
            most -= 1
        resident = _spread(most, layout)
        frames = allocate_frames(kept_in, layout, len(resident))
        self._resident = dict(zip(resident, frames, strict=True))
        num_frames = min(ring_chunks, layout.num_chunks - len(resident))
        self._frames = allocate_frames(memory, layout, num_frames, places)
        """All frames of the ring."""
        self._free = [*self._frames]
        self._num_frames = num_frames
        self.ring_bytes = frames_bytes(memory, layout, num_frames, places)
        self.resident_bytes = frames_bytes(kept_in, layout, len(resident))
        self._held: set[int] = set()
        """Resident chunks whose memory holds their current state."""
        self._dirty: set[int] = set()
        """Held chunks whose state has not been written to the present target."""
        self._flushing: set[int] = set()
        """Held chunks that a seal is about to write; they must not change."""
        self._changed = Monitor()
        self._source: SlotFiles | None = None
        self._queue: deque[int] = deque()
        self._loading: dict[int, Frame] = {}
        self._writing: dict[int, Frame] = {}
        self._dropping: list[Frame] = []
        """Frames of dropped chunks, in which reads may still be in progress."""
        self.error: Exception | None = None
        """First error of a transfer since the last `reset`; the working slot is then torn."""
        self.meter = meter

    def begin(self, source: SlotFiles | None, chunks: Sequence[int]) -> None:
        """Set the chunks that will be taken next, in order, and the slot that they are read from.

        Chunks that have been read ahead from the same source are kept if they are among the next to
        be taken. Others are dropped, because they could fill the ring before they are needed.
        """
        with self._changed:
            self._queue.clear()
            wanted: set[int] = set()
            if source is self._source:
                wanted = {c for c in chunks if c in self._resident}
                wanted.update([c for c in chunks if c not in wanted][: self._num_frames])
            for chunk in [c for c in self._loading if c not in wanted]:
                self._drop(self._loading.pop(chunk))
            self._source = source
            self._queue.extend(c for c in chunks if c not in self._loading and c not in self._held)
            self._pump()

    def take(self, chunk: int) -> Frame:
        """Wait until a chunk has been read, and return its frame, which the caller then owns.

        What was read is checked in the first pass over a restored checkpoint, and in every pass
        with `verify_reads`.
        """
        with self._changed:
            ready = self._frame_if_ready(chunk)
        if ready is None:  # writes hold all frames
            with self.meter.timed("wait_write_s", chunk=chunk):
                ready = self._changed.wait_until(partial(self._frame_if_ready, chunk))
        frame = ready
        if chunk in self._held:
            return frame
        source = self._source
        is_recut = isinstance(source, RecutSource)
        is_checked = source is not None and (source.unchecked or self._verify_reads)
        is_ready = all(future.done() for future in frame.futures)
        waits = frame.is_late or is_recut or is_checked or not is_ready
        try:
            with self.meter.timed("wait_read_s", chunk=chunk) if waits else nullcontext():
                if frame.is_late and source is not None:
                    source.wait_arrived(chunk)
                    self._start_reads(frame, chunk, source)
                for future in frame.futures:
                    future.result()
                if isinstance(source, RecutSource):
                    if chunk < source.layout.num_chunks:
                        plan = source.layout.plans[chunk]
                        frame.fill(plan, partial(source.fill, chunk))
                elif source is not None and is_checked:
                    check_read(frame, source)
        except BaseException:
            with self._changed:
                self._release(frame)
            raise
        if chunk not in self._resident:
            frame.digests = frame.new_digests()
        return frame

    def _frame_if_ready(self, chunk: int) -> Frame | None:
        """Return the frame of a chunk that is being read or is in memory; None if it is neither."""
        self.raise_error()
        if chunk in self._loading or self._is_idle(chunk):
            return self._loading.pop(chunk, None) or self._resident[chunk]
        if chunk not in self._queue and chunk not in self._held:
            raise RuntimeError(f"chunk {chunk} is requested, but begin() did not name it")
        return None

    def put(self, frame: Frame, target: SlotFiles, run: Run = one_by_one) -> None:
        """Digest a frame's chunk and start writing it; the frame is free when the write ends.

        Bytes that `Frame.digests` was told of have been digested already. A resident chunk stays in
        memory, and the next `Flush` writes it.
        """
        if frame.chunk in self._resident:
            with self._changed:
                self.raise_error()
                self._held.add(frame.chunk)
                self._dirty.add(frame.chunk)
            return
        self._write(frame, target, run)

    def _write(self, frame: Frame, target: SlotFiles, run: Run) -> None:
        chunk = frame.chunk
        try:
            self.raise_error()
            plan = self.layout.plans[chunk]
            transfers = frame.buffers(plan)
            digests = frame.digests or frame.new_digests()
            frame.digests = None
            files, known = target.files_by_drive[plan.drive], target.digests
            for name, digest in digests.finish(target.context, chunk, run).items():
                known[name][chunk] = digest
        except BaseException:
            self.discard(frame)
            raise
        frame.futures = []
        try:
            self._writing[chunk] = frame
            for name, (buffer, offset) in transfers.items():
                if buffer.nbytes:
                    file = files[plan.arrays[name].file_name]
                    frame.futures.append(file.write(buffer, offset))
            if frame.model is not None:
                frame.model.write(chunk, cast(OpenSlot, target), run, frame.futures)
        except Exception as error:
            with self._changed:
                self.error = self.error or error
            raise
        finally:
            self._when_ended(frame.futures, partial(self._written, frame))

    def discard(self, frame: Frame) -> None:
        """Release a taken frame without writing it; its content is lost."""
        with self._changed:
            self._release(frame)
            self._pump()

    def keep(self, frame: Frame) -> None:
        """Release a taken frame that has not been changed. A resident chunk stays in memory."""
        frame.digests = None
        with self._changed:
            if self._resident.get(frame.chunk) is frame:
                self._held.add(frame.chunk)
            else:
                self._free.append(frame)
            self._pump()

    def flush(self) -> Flush:
        """Return the writes that a seal of the present target must complete.

        Dirty chunks must not change from now on, until they have been written.
        """
        with self._changed:
            self.raise_error()
            pending = [(frame, frame.futures) for frame in self._writing.values()]
            self._flushing, self._dirty = self._dirty, set()
            return Flush(self, pending, sorted(self._flushing))

    def wait_ended(self, writes: Sequence[tuple[Frame, Sequence[IOFuture]]]) -> None:
        """Wait until the end of writes, given with their frames, has been recorded."""

        def have_ended() -> bool:
            """Return whether no frame is still in the given write."""
            return not any(
                self._writing.get(frame.chunk) is frame and frame.futures is futures
                for frame, futures in writes
            )

        self._changed.wait_until(have_ended)

    def wait_written(self, chunks: Iterable[int]) -> None:
        """Wait until no write of these chunks is in progress; raise the first write's error."""
        waited = set(chunks)
        self._changed.wait_until(lambda: waited.isdisjoint(self._writing))
        self.raise_error()

    def thaw(self) -> None:
        """Mark the chunks of `flush` as dirty again. None of them has been written."""
        with self._changed:
            self._dirty |= self._flushing
            self._flushing.clear()
            self._changed.notify_all()

    def synchronize(self) -> None:
        """Wait until every transfer that has been started has ended."""
        self._changed.wait_until(lambda: not (self._writing or self._dropping))
        with self._changed:
            loading = [f for frame in self._loading.values() for f in frame.futures]
        for future in loading:
            _wait(future)
        self.raise_error()

    def reset(self) -> None:
        """Wait for all transfers, then discard all chunks in memory and forget errors.

        This includes transfers that were started but not recorded because of an interrupt.
        """
        with self._changed:
            self._queue.clear()
        # All frames are waited for, because some may be in use without being recorded as such.
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
                frame.futures = []  # their callbacks refer to this object: a cycle keeps memory
            self._source = None
            self.error = None

    def release(self) -> None:
        """Free all memory. Only the sizes can be asked for afterwards; `reset` comes before."""
        with self._changed:
            self._resident, self._frames, self._free = {}, [], []

    def raise_error(self) -> None:
        """Raise the error of the first transfer that failed, if any."""
        if self.error is not None:
            raise self.error

    def _is_idle(self, chunk: int) -> bool:
        """Return whether a chunk is in memory and no seal needs its present content."""
        busy = chunk in self._flushing or chunk in self._writing
        return chunk in self._held and not busy

    def _release(self, frame: Frame) -> None:
        """Free a frame whose content is not the current state."""
        frame.digests = None
        if self._resident.get(frame.chunk) is frame:
            self._held.discard(frame.chunk)
        else:
            self._free.append(frame)

    def _when_ended(self, futures: Sequence[IOFuture], action: Callable[[], None]) -> None:
        """Run an action once, under the lock, when some transfers have ended.

        If they have ended already, it runs at once. If the caller is interrupted, it waits for the
        transfers, so that the action runs in any case.
        """
        left = set(range(len(futures)))
        is_done = False

        def ended(numbers: Iterable[int]) -> None:
            """Count chunks as ended, and act once after the last one."""
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
        """Free a frame whose writes have ended, or could not all be started."""
        errors = [error for future in frame.futures if (error := _error_of(future))]
        self.error = self.error or next(iter(errors), None)
        if frame.model is not None:
            frame.model.writes_ended(succeeded=not errors)
        if self._writing.get(frame.chunk) is not frame:
            return
        del self._writing[frame.chunk]
        if frame.chunk in self._resident:
            self._flushing.discard(frame.chunk)
        else:
            self._free.append(frame)
        self._pump()
        self._changed.notify_all()

    def _drop(self, frame: Frame) -> None:
        """Drop a chunk that was read ahead. Its frame becomes free when the reads have ended."""
        self._dropping.append(frame)
        self._when_ended(frame.futures, partial(self._dropped, frame))

    def _dropped(self, frame: Frame) -> None:
        if frame in self._dropping:
            self._dropping.remove(frame)
            self._release(frame)
            self._pump()

    def _pump(self) -> None:
        """Start reads while there are chunks to read and frames to read into.

        Errors are stored, and `take` raises them, because this may run on a transfer's thread.
        """
        while self._queue and self.error is None:
            chunk = self._queue[0]
            if chunk in self._writing:
                break  # this method is called again when that write ends
            if chunk not in self._resident and not self._free:
                break
            self._queue.popleft()
            frame = self._resident.get(chunk) or self._free.pop()
            frame.chunk, frame.futures, frame.is_late = chunk, [], False
            try:
                self._read(frame, chunk)
                self._loading[chunk] = frame
            except BaseException as error:
                self._drop(frame)
                if not isinstance(error, Exception):
                    raise  # an interrupt, which this thread's caller handles
                self.error = error
                break
        self._changed.notify_all()

    def _read(self, frame: Frame, chunk: int) -> None:
        """Start the reads of a chunk, and record each started read in the frame."""
        source = self._source
        if source is None or isinstance(source, RecutSource):
            return  # there is no state; or `take` fills the frame
        if chunk >= source.layout.num_chunks:  # parameters that had no state before
            self._read_parameters(frame, chunk, source)
        elif source.has_arrived(chunk):
            self._start_reads(frame, chunk, source)
        else:
            frame.is_late = True  # `take` waits and reads; nothing is started for it before

    def _start_reads(self, frame: Frame, chunk: int, source: SlotFiles) -> None:
        plan, digests = source.layout.plans[chunk], source.digests
        files = source.files_by_drive[plan.drive]
        for name, (buffer, offset) in frame.buffers(plan).items():
            if digests[name][chunk] is None:
                continue  # never written, because no parameter in the chunk has state
            if buffer.nbytes:
                file = files[plan.arrays[name].file_name]
                frame.futures.append(file.read(buffer, offset))
        self._read_parameters(frame, chunk, source)

    def _read_parameters(self, frame: Frame, chunk: int, source: SlotFiles) -> None:
        if self.reads_model and frame.model is not None:
            frame.model.read(chunk, source, frame.futures)


class Flush:
    """All state that is not yet on storage when a checkpoint is requested."""

    def __init__(
        self,
        streamer: Streamer,
        pending: Sequence[tuple[Frame, Sequence[IOFuture]]],
        chunks: Sequence[int],
    ) -> None:
        self._streamer = streamer
        self._pending = list(pending)
        self._chunks = deque(chunks)

    def start(self, target: SlotFiles) -> None:
        """Digest the resident chunks and start writing them; each may change once it is written."""
        while self._chunks:
            frame = self._streamer._resident[self._chunks[0]]
            self._streamer._write(frame, target, one_by_one)  # training uses the pool meanwhile
            self._pending.append((frame, frame.futures))
            self._chunks.popleft()

    def wait_parameters(self) -> None:
        """Wait until everything has been written, if that includes parameters.

        Only then is it known which parameters the model file holds.
        """
        if self._streamer.writes_model:
            self.wait()
            self._streamer.wait_ended(self._pending)

    def wait(self) -> None:
        """Wait until everything has been written."""
        for _, writes in self._pending:
            for write in writes:
                write.result()

    def abandon(self) -> None:
        """Keep the chunks whose writes have not been started in memory only, for a later seal."""
        streamer = self._streamer
        with streamer._changed:
            streamer._flushing.difference_update(self._chunks)
            streamer._dirty.update(self._chunks)
            streamer._changed.notify_all()


def _spread(num: int, layout: Layout) -> list[int]:
    """Return the given number of chunks of a layout, or all, evenly spread."""
    total = layout.num_chunks
    num = min(num, total)
    return [c for c in range(total) if (c + 1) * num // total > c * num // total]


def _error_of(future: IOFuture) -> Exception | None:
    """Wait for a transfer and return its error; an interrupt of the wait is raised."""
    try:
        future.result()
    except Exception as error:  # noqa: BLE001  (callers raise it where the result is needed)
        return error
    return None


def _wait(future: IOFuture) -> None:
    # The content is not needed any more. A later read of the same place reports an error again.
    _error_of(future)
