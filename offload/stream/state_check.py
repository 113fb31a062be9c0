"""Reading all state of a checkpoint before anything is trained on it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from offload.store.slot import Slot
from offload.stream.meter import Meter
from offload.stream.streamer import Streamer

_log = logging.getLogger("offload")


def check_state(streamer: Streamer, slot: Slot, chunks: Sequence[int], meter: Meter) -> int:
    """Compare all state in a slot with its digests; the first pass need not do it again.

    Memory is the ring. What may stay in memory between steps stays there.

    Args:
        streamer: Reads the chunks.
        slot: The source of the next step.
        chunks: All chunks, in the order of that step.
        meter: Of the steps: what is waited for here is no part of one.

    Returns:
        The bytes of state that were read.

    Raises:
        DamagedError: Something is not what was written.
        gds.StorageError: Something cannot be read.
    """
    started = time.perf_counter()
    waited_s = meter.wait_read_s, meter.wait_write_s
    slot.unchecked = True
    streamer.begin(slot, chunks)
    try:
        for chunk in chunks:
            streamer.keep(streamer.take(chunk))
    finally:
        meter.wait_read_s, meter.wait_write_s = waited_s
    slot.unchecked = False
    num_bytes = slot.layout.state_bytes
    _log.info(
        "%s: all %.1f MiB of state are as they were written; checking them took %.1f s",
        slot.path,
        num_bytes / (1 << 20),
        time.perf_counter() - started,
    )
    return num_bytes
