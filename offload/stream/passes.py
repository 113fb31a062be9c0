"""The pass of chunks through a ring: each one is read, used, and written or left as it is.

Every pass over state uses this module: steps, moves to another slot, reads of all state into
memory, checks, imports and exports. Only this module decides what a pass leaves behind after an
error.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Protocol

import torch

from gds import Backend
from offload.checkpoint.sealed_slot import SlotFiles
from offload.device.filed import NewValues
from offload.format.digests import Digests, Run, one_by_one
from offload.format.layout import Layout
from offload.store.state_store import StateSlot, StateSource
from offload.stream.frame import Frame, HostFrames
from offload.stream.meter import Meter
from offload.stream.streamer import Streamer
from offload.update.kept_state import Scalars

_RING_CHUNKS = 3
"""Frames of a ring that is made for one pass: one is read, one is used, one is written."""


class RingPass:
    """One pass of chunks through a ring, from a source slot, if any, to a target, if it writes.

    Call `announce`, and then enter `taken` for each chunk in the announced order.
    """

    def __init__(
        self,
        streamer: Streamer,
        *,
        source: SlotFiles | None,
        target: SlotFiles | None = None,
        run: Run = one_by_one,
    ) -> None:
        self._streamer = streamer
        self._source = source
        self._target = target
        self._run = run

    def announce(self, chunks: Sequence[int]) -> None:
        """Set the chunks that are still to come, in order; the ring begins to read ahead."""
        self._streamer.begin(self._source, chunks)

    @contextmanager
    def taken(self, chunk: int) -> Iterator[Frame]:
        """Wait for a chunk, and yield its frame.

        At the end of the block the write of the chunk to the target begins; a pass that only reads
        does not write it. If the block raises anything, an interrupt included, nothing is written.
        The frame of a pass that writes is then free again, and its content is lost. The frame of a
        pass that only reads is unchanged.
        """
        streamer, target = self._streamer, self._target
        frame = streamer.take(chunk)
        if target is None:
            try:
                yield frame
            finally:
                streamer.keep(frame)
            return
        try:
            yield frame
        except BaseException:
            streamer.discard(frame)
            raise
        streamer.put(frame, target, self._run)


class SealInFlight:
    """A seal that has begun; this one copies nothing from the model, so no step waits for it."""

    slot: StateSlot | None
    """Slot that is about to become a checkpoint; None if the state is torn."""

    def stops(self, layout: Layout) -> Sequence[int]:
        """Return, for each chunk of a layout, the bytes that `wait_copied` has to wait for.

        The caller is a pass that is about to change tensors. Until then nobody may edit them.
        """
        return (0,) * layout.num_chunks

    def wait_copied(self, nbytes: int) -> None:
        """Wait until `nbytes` bytes of the model file's data have been copied from the model."""

    def wait_copied_of(self, name: str) -> None:
        """Wait until a tensor has been copied from the model."""

    def wait_all_copied(self) -> None:
        """Wait until everything has been copied from the model."""


class ChunkWork(Protocol):
    """Work on the chunks of a pass: a step, or filling the chunks with other state."""

    @property
    def device(self) -> torch.device:
        """Device on which the work needs a chunk: that of the frames, or the CPU."""
        ...

    @property
    def stages(self) -> bool:
        """Whether there is anything for `prepare` and `arrive` to do."""
        ...

    def touched(self, chunk: int) -> bool:
        """Return whether the work changes a chunk, even if the state stays in its slot."""
        ...

    def update(
        self,
        chunk: int,
        arrays: Mapping[str, torch.Tensor],
        digests: Digests | None = None,
        model: NewValues = (),
    ) -> None:
        """Change a chunk in place, and fill `model` with the values of its parameters."""
        ...

    def prepare(self, chunk: int) -> None:
        """Begin the work for a chunk that is possible before its update. Idempotent."""
        ...

    def arrive(self, chunk: int) -> None:
        """Wait for the work that `prepare` has begun for a chunk."""
        ...

    def fence(self) -> None:
        """Make the calling thread's work on devices wait for the parameters changed so far."""
        ...

    def finish(self) -> list[Scalars | None]:
        """Do what `fence` does, and return the scalar state of each parameter after the pass."""
        ...


class StatePass:
    """Reads, updates and writes a sequence of chunks.

    Args:
        streamer: Ring that moves the chunks.
        updater: Work that updates the chunks.
        step: Number of the step, from 1.
        source: Slot that holds the state; None if there is no state yet.
        target: Slot to write. It is the source itself if that is the working slot.
        chunks: Chunks in the order of their update.
        seal: Seal in flight that still copies parameters which the update changes, or None.
        run: Runner that computes the remaining digests of a chunk on several threads.
        lock: Lock that is held while the updater computes; None if the updater needs no lock.
    """

    def __init__(
        self,
        streamer: Streamer,
        updater: ChunkWork,
        *,
        step: int,
        source: StateSource | None,
        target: StateSlot,
        chunks: Sequence[int],
        seal: SealInFlight | None,
        run: Run,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        self.step = step
        self.source = source
        self.target = target
        self.chunks = chunks
        self.schedule: Iterable[int] = chunks
        """Iterable that yields the chunks in their order, each as soon as it may be updated. It may
        leave out last chunks if `announce` has been called without them."""
        self._ring = RingPass(streamer, source=source, target=target, run=run)
        self._stops = seal.stops(streamer.layout) if seal is not None else ()
        self.streamer = streamer
        self.updater = updater
        self._seal = seal
        self._meter = streamer.meter
        self._lock = nullcontext() if lock is None else lock

    def is_needed(self, chunk: int) -> bool:
        """Return whether the pass must step a chunk, or move it to another slot."""
        return self.source is not self.target or self.updater.touched(chunk)

    def announce(self, chunks: Sequence[int]) -> None:
        """Tell the ring which chunks are still to come."""
        self._ring.announce(chunks)

    def run(self, updated: Callable[[int], object] | None = None) -> list[Scalars | None]:
        """Update all chunks, and return the scalar state of each parameter after the step.

        The last writes may still be in progress then. `updated` is called with each chunk after its
        parameters have received their new values.
        """
        seal = self._seal
        self.announce(self.chunks)
        following = dict(pairwise(self.chunks)) if self.schedule is self.chunks else {}
        for chunk in self.schedule:
            if self.updater.stages:
                self.updater.prepare(chunk)
            with self._ring.taken(chunk) as frame:
                if seal is not None:
                    seal.wait_copied(self._stops[chunk])
                if self.updater.stages:
                    if chunk in following:
                        self.updater.prepare(following[chunk])
                    with self._meter.timed("wait_device_s", chunk=chunk):
                        self.updater.arrive(chunk)
                with self._meter.timed("compute_s", chunk=chunk):
                    self._update(chunk, frame)
                if updated is not None:
                    updated(chunk)
        with self._lock:
            scalars = self.updater.finish()
        if seal is not None:
            # After the pass, the user may also change frozen parameters, which no step changes.
            seal.wait_all_copied()
        return scalars

    def _update(self, chunk: int, frame: Frame) -> None:
        work = self.updater
        model = () if frame.model is None else frame.model.values(chunk)
        if frame.device == work.device:
            with self._lock:
                work.update(chunk, frame.tensors(), frame.digests, model)
            return
        with frame.copied_to_host(changes=True) as arrays, self._lock:
            # No byte is final before it is sent back to the frame.
            work.update(chunk, arrays, None, model)


@contextmanager
def ring_for_one_pass(
    backend: Backend, layout: Layout, *, verify_reads: bool = False
) -> Iterator[Streamer]:
    """Yield a small ring in host memory that belongs to no optimizer.

    All its transfers have ended when the block has been left, also by an error.

    Args:
        backend: Backend that allocates the memory.
        layout: Layout of the state.
        verify_reads: Whether every chunk that is read is compared with its digest.
    """
    streamer = Streamer(
        HostFrames(backend), layout, _RING_CHUNKS, Meter(), verify_reads=verify_reads
    )
    try:
        yield streamer
    finally:
        streamer.reset()


_log = logging.getLogger("offload")


def check_state(streamer: Streamer, slot: StateSource, chunks: Sequence[int], meter: Meter) -> int:
    """Compare all state in a slot with its digests, so that the first pass need not do so.

    The check needs no memory beyond the ring, and is not counted in the meter of the steps. The
    chunks are all, in the order of the next step. Returns the bytes of state that were read.
    """
    started = time.perf_counter()
    waited_s = meter.wait_read_s, meter.wait_write_s
    slot.distrust()
    reading = RingPass(streamer, source=slot)
    reading.announce(chunks)
    try:
        for chunk in chunks:
            with reading.taken(chunk):
                pass  # a chunk is compared with its digests before it can be used
    finally:
        meter.wait_read_s, meter.wait_write_s = waited_s
    slot.trust()
    num_bytes = slot.layout.state_bytes
    _log.info(
        "%s: all %.1f MiB of state are as they were written; checking them took %.1f s",
        slot.path,
        num_bytes / (1 << 20),
        time.perf_counter() - started,
    )
    return num_bytes
