"""One pass of the state through the update: chunk by chunk from a source slot to a target."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from offload.rules import Scalars
from offload.seal import Seal
from offload.slot import Slot
from offload.stats import Meter
from offload.streamer import Streamer
from offload.update import ChunkUpdater


class StatePass:
    """Reads, updates and writes a number of chunks.

    Args:
        streamer: Moves them.
        updater: Updates them.
        step: Number of the step that this is, from 1.
        source: The slot that holds the state; None if there is none yet.
        target: The slot to write; the same one, if it is the working slot.
        chunks: In the order in which to update them.
        seal: One in flight, which still copies parameters that the update changes.
        meter: Counts seconds.
    """

    def __init__(
        self,
        streamer: Streamer,
        updater: ChunkUpdater,
        *,
        step: int,
        source: Slot | None,
        target: Slot,
        chunks: Sequence[int],
        seal: Seal | None,
        meter: Meter,
    ) -> None:
        self.step = step
        self.source = source
        self.target = target
        self.chunks = chunks
        self._streamer = streamer
        self._updater = updater
        self._seal = seal
        self._meter = meter

    def run(self, updated: Callable[[int], object] | None = None) -> list[Scalars | None]:
        """Update all chunks; the last writes may still be in progress on return.

        Args:
            updated: Called with each chunk when its parameters have their new values.

        Returns:
            The scalar state of each parameter after the step.

        Raises:
            gds.StorageError: A transfer failed.
            CheckpointError: The first pass over a restored checkpoint found it damaged.
        """
        streamer, seal = self._streamer, self._seal
        model_stops = streamer.layout.model_stops
        streamer.begin(self.source, self.chunks)
        for chunk in self.chunks:
            frame = streamer.take(chunk)
            try:
                if seal is not None:
                    seal.wait_copied(model_stops[chunk])
                with self._meter.timed("compute_s", chunk=chunk):
                    self._updater.update(chunk, frame.tensors())
            except BaseException:
                streamer.discard(frame)
                raise
            if updated is not None:
                updated(chunk)
            streamer.put(frame, self.target)
        scalars = self._updater.finish()
        if seal is not None:
            # From here on the user may also change what no step does: frozen parameters.
            seal.wait_copied(seal.data_bytes)
        return scalars
