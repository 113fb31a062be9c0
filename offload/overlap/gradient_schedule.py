"""Order in which chunks are stepped while a backward produces the gradients one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from gds.waiting import Monitor
from offload.engine.chunk_pass import StatePass
from offload.errors import OverlapError
from offload.format.layout import Layout
from offload.update.updater import ChunkUpdater


class GradientSchedule:
    """Iterable that yields each chunk of a pass as soon as all its gradients are final.

    The order is fixed in advance, since the ring reads ahead. When no more gradients will come, the
    remaining chunks follow, if they have to be stepped or moved.

    Args:
        layout: Layout of the state.
        state_pass: Pass with the chunks, in the order to follow. Its updater gets the gradients.
    """

    def __init__(self, layout: Layout, state_pass: StatePass) -> None:
        self._pass = state_pass
        self._spans = [layout.chunks_of(number) for number in range(len(layout.parameters))]
        self._parameters_of: list[list[int]] = [[] for _ in range(layout.num_chunks)]
        for number, span in enumerate(self._spans):
            for chunk in span:
                self._parameters_of[chunk].append(number)
        self._num_missing = [len(numbers) for numbers in self._parameters_of]
        self._num_left = [len(span) for span in self._spans]
        self._bytes: dict[int, int] = {}
        self._held_bytes = 0
        self.peak_bytes = 0
        """Largest number of bytes of gradients that were held at once."""
        self.ready: list[int] = []
        """Chunks that are ready, in the order in which the last of their gradients came."""
        self._changed = Monitor()
        self._is_complete = False
        self._is_abandoned = False

    def give(self, number: int, gradient: torch.Tensor) -> None:
        """Add the final gradient of a parameter; any thread may call this."""
        with self._changed:
            updater = self._pass.updater
            if not isinstance(updater, ChunkUpdater):
                raise TypeError(f"a pass of gradients is a step, not a {type(updater).__name__}")
            updater.set_gradient(number, gradient)
            if self._num_left[number]:
                self._bytes[number] = gradient.nbytes
                self._held_bytes += gradient.nbytes
                self.peak_bytes = max(self.peak_bytes, self._held_bytes)
            for chunk in self._spans[number]:
                self._num_missing[chunk] -= 1
                if self._num_missing[chunk] == 0:
                    self.ready.append(chunk)
            self._changed.notify_all()

    def complete(self) -> None:
        """Note that no more gradients will come."""
        with self._changed:
            self._is_complete = True
            self._changed.notify_all()

    def abandon(self) -> None:
        """Make the pass fail instead of waiting for more gradients."""
        with self._changed:
            self._is_abandoned = True
            self._changed.notify_all()

    def order(self) -> list[int]:
        """Return all chunks, in the order in which their gradients came in this pass."""
        seen = set(self.ready)
        return self.ready + [c for c in self._pass.chunks if c not in seen]

    def __iter__(self) -> Iterator[int]:
        chunks: Sequence[int] = self._pass.chunks
        num_taken = 0
        while num_taken < len(chunks) and self._wait_for(chunks[num_taken]):
            yield chunks[num_taken]
            self._applied(chunks[num_taken])
            num_taken += 1
        rest = [c for c in chunks[num_taken:] if self._pass.is_needed(c)]
        self._pass.announce(rest)
        for chunk in rest:
            yield chunk
            self._applied(chunk)

    def _wait_for(self, chunk: int) -> bool:
        """Wait until all gradients of a chunk are final, or no more will come."""
        self._changed.wait_until(
            lambda: not self._num_missing[chunk] or self._is_complete or self._is_abandoned
        )
        if self._is_abandoned:
            raise OverlapError("backward() had applied some of its gradients, not all")
        return self._num_missing[chunk] == 0

    def _applied(self, chunk: int) -> None:
        with self._changed:
            for number in self._parameters_of[chunk]:
                self._num_left[number] -= 1
                if self._num_left[number] == 0:
                    self._held_bytes -= self._bytes.pop(number, 0)
