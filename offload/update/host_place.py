"""Updates in host memory: threads of the CPU, and the staging of tensors that are on a device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from offload.device.boundary import HOST
from offload.device.staging import FlatTensors, StagedTensors, Traffic, flat_tensors
from offload.format.digests import LEAF_BYTES, Digests
from offload.update.pool import BlockContext, UpdatePool
from offload.update.step_code import Call, LoadedChunk
from offload.update.step_inputs import StepInputs
from offload.update.step_keys import StepKeys

HOT_ELEMENTS = 512 << 10
"""Maximal number of elements in one call of torch's step: about 15 MiB with temporary values.

Blocks of half this size would stay in a cache for longer. But several threads take turns with the
interpreter, so there must be few calls.
"""

HOT_ELEMENTS_ONE_THREAD = LEAF_BYTES // 4
"""Maximal number of elements in one call on one thread: a whole leaf of each FP32 array, so that
the leaf is digested at once."""


class HostPlace:
    """The CPU as the place of updates; a `Place`.

    Args:
        pool: Threads that run the calls.
        keys: Keys of the parameters.
        inputs: Everything that the step computes with.
        traffic: Counter of the bytes that cross between the host and the parameters' device.
    """

    device = HOST

    def __init__(
        self, pool: UpdatePool, keys: StepKeys, inputs: StepInputs, traffic: Traffic
    ) -> None:
        self._pool = pool
        self._keys = keys
        self._layout = inputs.layout
        self.live = flat_tensors(inputs.parameters, writable=True, traffic=traffic)
        """Live parameters."""
        self.gradients = FlatTensors(inputs.gradients, writable=False)
        """Gradients."""
        self._staged: list[StagedTensors] = []
        if isinstance(self.live, StagedTensors):
            staged = StagedTensors(inputs.gradients, writable=False, traffic=traffic)
            self.gradients = staged
            self._staged = [self.live, staged]

    def set_gradient(self, index: int, gradient: torch.Tensor) -> None:
        """Set the gradient of a parameter that had none."""
        self.gradients.replace(index, gradient)

    def prepare(self, chunk: int) -> bool:
        """Begin to copy a chunk's parameters and gradients from their device to the host."""
        if self._staged:
            keys = self._keys.of
            pieces = self._layout.plans[chunk].pieces
            pieces = tuple(p for p in pieces if keys[p.parameter].is_updated)
            for tensors in self._staged:
                tensors.prepare(chunk, pieces, lambda index: keys[index].has_gradient)
        return bool(self._staged)

    def arrive(self, chunk: int) -> None:
        """Wait until the data that `prepare` requested is in host memory."""
        for tensors in self._staged:
            tensors.arrive(chunk)

    @contextmanager
    def loaded(
        self, chunk: int, arrays: Mapping[str, torch.Tensor], digests: Digests | None
    ) -> Iterator[LoadedChunk]:
        """Begin to send the chunk's parameters back after the block."""
        num_threads = self._pool.num_threads
        yield LoadedChunk(chunk, arrays, digests, num_threads, _block_elements(num_threads))
        for tensors in self._staged:
            tensors.leave(chunk)

    def run(self, calls: Sequence[Call]) -> None:
        """Run the calls on the threads of the pool."""
        self._pool.run(_run, calls)

    def fence(self) -> None:
        """Make the calling thread's current streams wait for the parameters sent back so far."""
        for tensors in self._staged:
            tensors.fence()


def _block_elements(num_threads: int) -> int:
    return min(HOT_ELEMENTS, HOT_ELEMENTS_ONE_THREAD) if num_threads == 1 else HOT_ELEMENTS


def _run(context: BlockContext, call: Call) -> None:
    call.run(context)
