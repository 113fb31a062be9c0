"""The places where chunks are updated: host memory with the threads of the CPU, or a device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from offload.device.boundary import HOST, Event, boundary_of, marks_of
from offload.device.compute import Compute
from offload.device.flat_tensors import FlatTensors
from offload.device.staging import StagedTensors, Traffic, flat_tensors
from offload.errors import UnsupportedParameterError
from offload.format.digests import LEAF_BYTES, Digests
from offload.update.pool import BlockContext, UpdatePool
from offload.update.rules import UpdateRule
from offload.update.step_code import Call, LoadedChunk
from offload.update.step_keys import StepInputs, StepKeys

HOT_ELEMENTS = 512 << 10
"""Maximal number of elements in one call of torch's step: about 15 MiB with temporary values.

Blocks of half this size would stay in a cache for longer. But several threads take turns with the
interpreter, so there must be few calls.
"""

HOT_ELEMENTS_ONE_THREAD = LEAF_BYTES // 4
"""Maximal number of elements in one call on one thread: a whole leaf of each FP32 array, so that
the leaf is digested at once."""


class Place(Protocol):
    """Where the chunks of one step are updated: in host memory, or in that of a device."""

    @property
    def device(self) -> torch.device:
        """Device on which chunks are updated."""
        ...

    def set_gradient(self, index: int, gradient: torch.Tensor) -> None:
        """Set the gradient of a parameter that had none; see `ChunkUpdater.set_gradient`."""
        ...

    def prepare(self, chunk: int) -> bool:
        """Begin to bring a chunk's parameters and gradients here; see `ChunkUpdater.prepare`."""
        ...

    def arrive(self, chunk: int) -> None:
        """Wait until the data that `prepare` requested is here."""
        ...

    def loaded(
        self, chunk: int, arrays: Mapping[str, torch.Tensor], digests: Digests | None
    ) -> AbstractContextManager[LoadedChunk]:
        """Return a block in which a chunk is updated. Its parameters are here within the block.

        After a block that raises nothing, the chunk's parameters are on their way back, and the
        digests know of the chunk's bytes. In every case, the chunk's memory is free for other uses.

        Args:
            chunk: Index of the chunk.
            arrays: As for `ChunkUpdater.update`.
            digests: As for `ChunkUpdater.update`.
        """
        ...

    def run(self, calls: Sequence[Call]) -> None:
        """Run all calls of the chunk that is loaded.

        Raises:
            BaseException: The error of one of the calls, or an interrupt. No call is in progress
                any more.
        """
        ...

    def fence(self) -> None:
        """Make the calling thread's current streams wait for the parameters updated so far."""
        ...


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


_RUN_ELEMENTS = 16 << 20
"""Elements of one call of torch's own step: few calls, and bounded temporary memory."""


class DevicePlace:
    """A device as the place of updates; a `Place`.

    The block of `loaded` ends when the work that was queued in it has ended. The memory that it
    used is then free for other uses, and work that is launched afterwards, on any stream, sees the
    new parameters.

    Args:
        compute: Compute of the device that holds parameters, gradients and frames.
        rule: Update rule that makes the stepper.
        inputs: Everything that the step computes with.

    Raises:
        UnsupportedParameterError: A parameter or gradient is on another device by now; names the
            parameter.
    """

    def __init__(self, compute: Compute, rule: UpdateRule, inputs: StepInputs) -> None:
        self.device = compute.device
        layout, parameters, gradients = inputs.layout, inputs.parameters, inputs.gradients
        for spec, *tensors in zip(layout.parameters, parameters, gradients, strict=True):
            for tensor in tensors:
                if tensor is not None and tensor.device != self.device:
                    raise UnsupportedParameterError(
                        f"parameter {spec.name!r}, or its gradient, is on {tensor.device} now, "
                        f"but its state was updated on {self.device} before: move it back"
                    )
        self._compute = compute
        self._layout = layout
        self.live = FlatTensors(parameters, writable=True)
        """Live parameters."""
        self.gradients = FlatTensors(gradients, writable=False)
        """Gradients."""
        self._begun = list(marks_of([*parameters, *gradients]).values())
        self._given: dict[int, Event] = {}
        self._context = BlockContext(rule, compute.empty)

    def set_gradient(self, index: int, gradient: torch.Tensor) -> None:
        """Set the gradient of a parameter that had none, in the current stream's order."""
        self.gradients.replace(index, gradient)
        self._given[index] = boundary_of(gradient.device).now()

    def prepare(self, chunk: int) -> bool:  # noqa: ARG002
        """Return False: everything is on the device already."""
        return False

    def arrive(self, chunk: int) -> None:
        """Do nothing: everything is on the device already."""

    @contextmanager
    def loaded(
        self, chunk: int, arrays: Mapping[str, torch.Tensor], digests: Digests | None
    ) -> Iterator[LoadedChunk]:
        """Queue the block's work, digest the chunk after it, and wait until both are done."""
        compute = self._compute
        numbers = {piece.parameter for piece in self._layout.plans[chunk].pieces}
        given = numbers & self._given.keys()
        # torch reuses freed memory at once for allocations on the training's stream. Gradients are
        # therefore referenced until this chunk's work has ended.
        held = [self.gradients.tensor(number) for number in numbers]
        with compute.queue([*self._begun, *(self._given[index] for index in given)]):
            try:
                yield LoadedChunk(chunk, arrays, None, 1, _RUN_ELEMENTS)
                if digests is not None:
                    for name, array in arrays.items():
                        digests.written(name, 0, array.nbytes)
            finally:  # also after an error, because the caller is about to reuse this memory
                done = compute.mark()
                compute.wait(done)
                held.clear()

    def run(self, calls: Sequence[Call]) -> None:
        """Queue the work of all calls, in their order."""
        for call in calls:
            call.run(self._context)

    def fence(self) -> None:
        """Do nothing: the updates of all chunks have ended."""
