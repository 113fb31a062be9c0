"""One pass of the state through the update: chunk by chunk from a source slot to a target."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Protocol

import torch

from offload.engine.seal import Seal
from offload.format.digests import Digests, Run
from offload.store.slot import Slot
from offload.stream.frame import Frame
from offload.stream.meter import Meter
from offload.stream.passes import RingPass
from offload.stream.streamer import Streamer
from offload.update.rules import Scalars

STEP_THREAD = "offload-step"
"""Name of threads that run a pass beside the model."""


class ChunkWork(Protocol):
    """What is done to the chunks of a pass: a step, or filling them with other state."""

    @property
    def device(self) -> torch.device:
        """Where it wants a chunk to be: where the frames are, or the CPU."""
        ...

    def touched(self, chunk: int) -> bool:
        """Return whether there is anything to do to a chunk, even if the state does not move."""
        ...

    def update(
        self, chunk: int, arrays: Mapping[str, torch.Tensor], digests: Digests | None = None
    ) -> None:
        """Change a chunk in place, given just its range of each state array, as it is stored.

        `digests`, if there are any, may be told what has been written, as soon as it has.
        """
        ...

    def prepare(self, chunk: int) -> bool:
        """Begin what can be done for a chunk before it is updated; more than once does no harm.

        Returns whether `arrive` is to be called before `update`.
        """
        ...

    def arrive(self, chunk: int) -> None:
        """Wait for what `prepare` has begun."""
        ...

    def fence(self) -> None:
        """Let the calling thread's work on devices wait for the parameters changed so far."""
        ...

    def finish(self) -> list[Scalars | None]:
        """Return the scalar state of each parameter after the pass."""
        ...


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
        run: Spreads what remains of a chunk's digests over threads.
        lock: Held while the updater computes; None if it needs no lock.
    """

    def __init__(
        self,
        streamer: Streamer,
        updater: ChunkWork,
        *,
        step: int,
        source: Slot | None,
        target: Slot,
        chunks: Sequence[int],
        seal: Seal | None,
        meter: Meter,
        run: Run,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        self.step = step
        self.source = source
        self.target = target
        self.chunks = chunks
        self.schedule: Iterable[int] = chunks
        """Yields each of the chunks, in that order, when it may be updated; some may be left out
        in the end, if `announce` is told."""
        self._ring = RingPass(streamer, source=source, target=target, run=run)
        self._model_stops = streamer.layout.model_stops
        self.updater = updater
        self._seal = seal
        self._meter = meter
        self._lock = nullcontext() if lock is None else lock

    def is_needed(self, chunk: int) -> bool:
        """Return whether anything is to be done to a chunk: it is stepped, or moves."""
        return self.source is not self.target or self.updater.touched(chunk)

    def announce(self, chunks: Sequence[int]) -> None:
        """Say which chunks are still to come."""
        self._ring.announce(chunks)

    def run(self, updated: Callable[[int], object] | None = None) -> list[Scalars | None]:
        """Update all chunks; the last writes may still be in progress on return.

        Args:
            updated: Called with each chunk when its parameters have their new values.

        Returns:
            The scalar state of each parameter after the step.

        Raises:
            gds.StorageError: A transfer failed.
            DamagedError: The state that was read is not what was written.
        """
        seal = self._seal
        self.announce(self.chunks)
        ahead = dict(pairwise(self.chunks)) if self.schedule is self.chunks else {}
        for chunk in self.schedule:
            crosses = self.updater.prepare(chunk)
            with self._ring.taken(chunk) as frame:
                if seal is not None:
                    seal.wait_copied(self._model_stops[chunk])
                if crosses:
                    if chunk in ahead:
                        self.updater.prepare(ahead[chunk])
                    with self._meter.timed("wait_device_s", chunk=chunk):
                        self.updater.arrive(chunk)
                with self._meter.timed("compute_s", chunk=chunk):
                    self._update(chunk, frame)
                if updated is not None:
                    updated(chunk)
        with self._lock:
            scalars = self.updater.finish()
        self.updater.fence()
        if seal is not None:
            # From here on the user may also change what no step does: frozen parameters.
            seal.wait_copied(seal.data_bytes)
        return scalars

    def _update(self, chunk: int, frame: Frame) -> None:
        work, digests = self.updater, frame.digests
        with frame.tensors_on(work.device, changes=True) as arrays, self._lock:
            # Of copies nothing is final before they are sent back.
            work.update(chunk, arrays, digests if frame.device == work.device else None)
