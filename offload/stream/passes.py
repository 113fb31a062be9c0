"""The pass of chunks through a ring: each one is read, used, and written or left as it is.

Every pass over state uses this module: steps, moves to another slot, reads of all state into
memory, checks, imports and exports. Only this module decides what a pass leaves behind after an
error.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from gds import Backend
from offload.checkpoint.sealed_slot import SlotFiles
from offload.format.digests import Run, one_by_one
from offload.format.layout import Layout
from offload.store.state_store import StateSource
from offload.stream.frame import Frame, HostFrames
from offload.stream.meter import Meter
from offload.stream.streamer import Streamer

_RING_CHUNKS = 3
"""Frames of a ring that is made for one pass: one is read, one is used, one is written."""


class ChunkOrder:
    """The order in which steps take the chunks; the step strategy sets it."""

    def __init__(self) -> None:
        self.learned: Sequence[int] = ()
        """All chunks in the order of the last steps; not used if the layout has other chunks."""
        self.is_backwards = False
        """Whether steps take the last chunk first until an order has been learned."""

    def of(self, layout: Layout) -> Sequence[int]:
        """Return all chunks of a layout in the order of a step."""
        if len(self.learned) == layout.num_chunks:
            return self.learned
        chunks = range(layout.num_chunks)
        return chunks[::-1] if self.is_backwards else chunks


class RingPass:
    """One pass of chunks through a ring.

    Call `announce`, and then enter `taken` for each chunk in the announced order.

    Args:
        streamer: Streamer that owns the ring.
        source: Slot that chunks are read from; None if no parameter has state yet.
        target: Slot that chunks are written to; None for a pass that only reads.
        run: Runner that spreads the remaining digests of a chunk over threads.
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

        Raises:
            gds.StorageError: The read failed, or an earlier write failed.
            DamagedError: The bytes read are not those that were written.
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

    The check needs no memory beyond the ring. Resident chunks stay in memory.

    Args:
        streamer: Streamer that reads the chunks.
        slot: Slot that will be the source of the next step.
        chunks: All chunks, in the order of that step.
        meter: Meter of the steps. Waits in this check are not counted in it.

    Returns:
        The bytes of state that were read.

    Raises:
        DamagedError: Some state is not as it was written.
        gds.StorageError: Some state cannot be read.
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
