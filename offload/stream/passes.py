"""The pass of chunks through a ring: each one is read, used, and written or left as it is.

Every pass over state is made of this: a step, a move to another slot, reading all state into
memory, an import and an export. What a pass leaves behind after an error is decided here alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from gds import Backend
from offload.checkpoint.sealed_slot import SlotFiles
from offload.format.digests import Run, one_by_one
from offload.format.layout import Layout
from offload.store.slot import Slot
from offload.stream.frame import Frame, HostFrames
from offload.stream.meter import Meter
from offload.stream.streamer import Streamer

_RING_CHUNKS = 3
"""Frames of a ring that is made for one pass: one is read, one is used, one is written."""


class RingPass:
    """One pass of chunks through a ring.

    Call `announce`, and then enter `taken` for each chunk in the announced order.

    Args:
        streamer: Owns the ring.
        source: Slot that chunks are read from; None if no parameter has state yet.
        target: Slot that chunks are written to; None for a pass that only reads.
        run: Spreads what remains of a chunk's digests over threads.
    """

    def __init__(
        self,
        streamer: Streamer,
        *,
        source: SlotFiles | None,
        target: Slot | None = None,
        run: Run = one_by_one,
    ) -> None:
        self._streamer = streamer
        self._source = source
        self._target = target
        self._run = run

    def announce(self, chunks: Sequence[int]) -> None:
        """Say which chunks are still to come, in their order; the ring reads ahead."""
        self._streamer.begin(self._source, chunks)

    @contextmanager
    def taken(self, chunk: int) -> Iterator[Frame]:
        """Wait for a chunk and have its frame within the block.

        At the end of the block the chunk begins to be written to the target; a pass that only reads
        leaves it as it is. If the block raises anything, an interrupt included, nothing is written:
        the frame of a pass that writes is free again and what it held is lost, and the frame of a
        pass that only reads is unchanged.

        Raises:
            gds.StorageError: The read failed, or an earlier write did.
            DamagedError: What was read is not what was written.
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
    """Have a small ring in host memory, which is no optimizer's.

    All its transfers have ended when the block has been left, however that came.

    Args:
        backend: Allocates the memory.
        layout: Layout of the state.
        verify_reads: Compare every chunk that is read with its digest.
    """
    streamer = Streamer(
        HostFrames(backend), layout, _RING_CHUNKS, Meter(), verify_reads=verify_reads
    )
    try:
        yield streamer
    finally:
        streamer.reset()
