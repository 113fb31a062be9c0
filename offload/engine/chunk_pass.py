"""One pass of the state through the update: chunk by chunk, from a source slot to a target slot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Protocol

import torch

from offload.engine.arrival import Arrival
from offload.engine.failed_seal import FailedSeal
from offload.engine.seal import Seal
from offload.format.digests import Digests, Run
from offload.store.state_store import StateSlot, StateSource
from offload.stream.frame import Frame
from offload.stream.meter import Meter
from offload.stream.passes import RingPass
from offload.stream.streamer import Streamer
from offload.update.kept_state import Scalars

STEP_THREAD = "offload-step"
"""Name of the threads that run a pass beside the model."""


class ChunkWork(Protocol):
    """Work on the chunks of a pass: a step, or filling the chunks with other state."""

    @property
    def device(self) -> torch.device:
        """Device on which the work needs a chunk: that of the frames, or the CPU."""
        ...

    def touched(self, chunk: int) -> bool:
        """Return whether the work changes a chunk, even if the state stays in its slot."""
        ...

    def update(
        self, chunk: int, arrays: Mapping[str, torch.Tensor], digests: Digests | None = None
    ) -> None:
        """Change a chunk in place.

        Args:
            chunk: Index of the chunk.
            arrays: The chunk's range of each state array, by name, in the stored dtype.
            digests: Digests that are told of each range of bytes as soon as the range is final;
                None if no bytes are digested during the update.
        """
        ...

    def prepare(self, chunk: int) -> bool:
        """Begin the work for a chunk that is possible before its update. Idempotent.

        Returns:
            Whether `arrive` must be called before `update`.
        """
        ...

    def arrive(self, chunk: int) -> None:
        """Wait for the work that `prepare` has begun for a chunk."""
        ...

    def fence(self) -> None:
        """Make the calling thread's work on devices wait for the parameters changed so far."""
        ...

    def finish(self) -> list[Scalars | None]:
        """Return the scalar state of each parameter after the pass."""
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
        meter: Meter that counts seconds.
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
        seal: Seal | FailedSeal | Arrival | None,
        meter: Meter,
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
        self._meter = meter
        self._lock = nullcontext() if lock is None else lock

    def is_needed(self, chunk: int) -> bool:
        """Return whether the pass must step a chunk, or move it to another slot."""
        return self.source is not self.target or self.updater.touched(chunk)

    def announce(self, chunks: Sequence[int]) -> None:
        """Tell the ring which chunks are still to come."""
        self._ring.announce(chunks)

    def run(self, updated: Callable[[int], object] | None = None) -> list[Scalars | None]:
        """Update all chunks; the last writes may still be in progress on return.

        Args:
            updated: Called with each chunk after its parameters have received their new values.

        Returns:
            The scalar state of each parameter after the step.

        Raises:
            gds.StorageError: A transfer failed.
            DamagedError: The state that was read is not the state that was written.
        """
        seal = self._seal
        self.announce(self.chunks)
        following = dict(pairwise(self.chunks)) if self.schedule is self.chunks else {}
        for chunk in self.schedule:
            is_staged = self.updater.prepare(chunk)
            with self._ring.taken(chunk) as frame:
                if seal is not None:
                    seal.wait_copied(self._stops[chunk])
                if is_staged:
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
        self.updater.fence()
        if seal is not None:
            # After the pass, the user may also change frozen parameters, which no step changes.
            seal.wait_all_copied()
        return scalars

    def _update(self, chunk: int, frame: Frame) -> None:
        work, digests = self.updater, frame.digests
        with frame.tensors_on(work.device, changes=True) as arrays, self._lock:
            # If `arrays` are copies, no byte is final before they are sent back to the frame.
            work.update(chunk, arrays, digests if frame.device == work.device else None)
