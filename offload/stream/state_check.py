"""Check of all state of a checkpoint before training continues from it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from offload.store.state_store import StateSource
from offload.stream.meter import Meter
from offload.stream.passes import RingPass
from offload.stream.streamer import Streamer

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
