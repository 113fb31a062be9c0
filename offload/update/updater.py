"""The update of chunks: one order of calls, whichever place they run in and whichever code steps.

A `HostUpdater` or a `DeviceUpdater` is the place where chunks are updated. Each has the `StepCode`s
that step elements there. In one place, every code gives the same bits.

The live parameter wins: where it differs from its rounded master, it has been edited since the last
step, and replaces the master. If it *is* the upper half of the master (``master="split"``), an
edited value keeps the old lower half, which is less than half a step of bf16.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import torch

from offload.device.boundary import HOST, Event, boundary_of, marks_of
from offload.device.compute import Compute
from offload.device.filed import FiledTensor, FiledTensors, NewValues
from offload.device.staging import FlatTensors, StagedTensors, Traffic, flat_tensors
from offload.errors import UnsupportedParameterError
from offload.format.arrays import MASTER_LOW
from offload.format.digests import LEAF_BYTES, Digests
from offload.format.layout import Layout
from offload.gradients import SpilledTensors, is_spilled
from offload.update.coding.decoder import copy_values
from offload.update.device_step import DeviceStep, require_steppable
from offload.update.kept_state import Scalars
from offload.update.kernel import KernelStep, UpdateKernel
from offload.update.pool import BlockContext, UpdatePool
from offload.update.rules import UpdateRule
from offload.update.step_code import Call, LoadedChunk, StepCode
from offload.update.step_keys import StepInputs, StepKeys
from offload.update.torch_step import TorchStep

HOT_ELEMENTS = 512 << 10
"""Maximal number of elements in one call of torch's step: about 15 MiB with temporary values.

Blocks of half this size would stay in a cache for longer. But several threads take turns with the
interpreter, so there must be few calls.
"""

HOT_ELEMENTS_ONE_THREAD = LEAF_BYTES // 4
"""Maximal number of elements in one call on one thread: a whole leaf of each FP32 array, so that
the leaf is digested at once."""

_RUN_ELEMENTS = 16 << 20
"""Elements of one call of torch's own step on a device: few calls, and bounded temporary memory."""


class ChunkUpdater(ABC):
    """Updates the chunks of one step, in host memory or in that of a device."""

    device: torch.device
    """Device on which chunks are updated."""

    _live: FlatTensors
    _gradients: FlatTensors
    _codes: Sequence[StepCode]
    """Code that steps elements: each takes what it can, and the last one everything."""

    def __init__(self, layout: Layout, keys: StepKeys) -> None:
        self._layout = layout
        self._keys = keys

    stages = False
    """Whether data has to be brought here, by `prepare` and `arrive`."""

    def set_gradient(self, index: int, gradient: torch.Tensor) -> None:
        """Set the gradient of a parameter that had none, before any of its chunks is updated.

        If the gradient is on a device, its values are those that the work queued on the current
        stream so far computes.
        """
        self._gradients.replace(index, gradient)
        self._keys.add_gradient(index)
        for code in self._codes:
            code.add_gradient(index)

    def touched(self, chunk: int) -> bool:
        """Return whether any parameter in the chunk has a gradient."""
        pieces, keys = self._layout.plans[chunk].pieces, self._keys.of
        return any(keys[piece.parameter].has_gradient for piece in pieces)

    def prepare(self, chunk: int) -> None:  # noqa: B027
        """Begin to bring the data that a chunk needs to the place where the chunk is updated.

        The caller then waits for the chunk's state, and then calls `arrive` and `update`.
        """

    def arrive(self, chunk: int) -> None:  # noqa: B027
        """Wait until the data that `prepare` requested has arrived."""

    def update(
        self,
        chunk: int,
        arrays: Mapping[str, torch.Tensor],
        digests: Digests | None = None,
        model: NewValues = (),
    ) -> None:
        """Step one chunk. On return, the memory of `arrays` is free for other uses.

        The new values of parameters are copied into `model`: those that are not stepped as well.
        """
        with self._loaded(chunk, arrays, digests) as loaded:
            numbers = np.arange(len(self._layout.plans[chunk].pieces))
            calls: list[Call] = []
            asked = []
            for code in self._codes:
                taken, numbers = code.calls(loaded, numbers)
                calls += taken
                asked.append(code)
                if not len(numbers):
                    break
            self._run(calls)
            copy_values(self._live, model)
            for code in asked:
                code.done(loaded)

    @abstractmethod
    def _loaded(
        self, chunk: int, arrays: Mapping[str, torch.Tensor], digests: Digests | None
    ) -> AbstractContextManager[LoadedChunk]:
        """Return a block in which a chunk is updated, with its parameters here.

        After a block that raises nothing, they are on their way back, and the digests know of the
        chunk's bytes. In every case, the chunk's memory is free for other uses.
        """

    @abstractmethod
    def _run(self, calls: Sequence[Call]) -> None:
        """Run all calls of the chunk that is loaded; none is in progress after an error."""

    def fence(self) -> None:  # noqa: B027
        """Make the calling thread's current streams wait for the parameters updated so far."""

    def finish(self) -> list[Scalars | None]:
        """Do what `fence` does, and return the scalar state of each parameter after the step."""
        scalars = self._keys.finish()
        self.fence()
        return scalars

    def code(self, chosen: str) -> str:
        """Return which code takes this step, in words."""
        first = self._codes[0]
        if first.doubts:
            chosen = f"{chosen}, although {'; '.join(first.doubts)}"
        found = [first.why_not(group) for group in range(len(self._keys.groups))]
        reasons = [reason for reason in found if reason]
        if not reasons:
            return chosen
        torchs = f"torch ({'; '.join(dict.fromkeys(reasons))})"
        return torchs if len(reasons) == len(found) else f"{chosen}, {torchs}"


class HostUpdater(ChunkUpdater):
    """Updates chunks on the CPU: by the kernel, the rest by torch's code.

    Args:
        rule: Update rule of the optimizer.
        pool: Threads that update.
        inputs: Everything that the step computes with.
        kernel: Kernel that steps the parameters that it can; None for torch's code only.
        traffic: Counter of the bytes that cross between the host and the parameters' device.
        copies_all: Whether parameters that are not stepped are copied from their device as well,
            because `update` is given memory for them.
        unwritten: Parameters whose values the slot lacks, so that their chunks are written.
    """

    device = HOST

    def __init__(
        self,
        rule: UpdateRule,
        pool: UpdatePool,
        inputs: StepInputs,
        *,
        kernel: UpdateKernel | None = None,
        traffic: Traffic | None = None,
        copies_all: bool = False,
        unwritten: Container[int] = (),
    ) -> None:
        # State that is stored exactly needs the bits of torch's default step; see
        # `UpdateRule.fused`.
        may_fuse = inputs.layout.state_dtype != "float32"
        keys = StepKeys(rule, pool, inputs, may_fuse=may_fuse)
        super().__init__(inputs.layout, keys)
        self._pool = pool
        self._copies_all = copies_all
        self._unwritten = unwritten
        traffic = traffic or Traffic()
        if any(isinstance(parameter, FiledTensor) for parameter in inputs.parameters):
            live: FlatTensors = FiledTensors(inputs.parameters, writable=True, traffic=traffic)
        else:
            live = flat_tensors(inputs.parameters, writable=True, traffic=traffic)
        self._live = live
        self._gradients = FlatTensors(inputs.gradients, writable=False)
        self._staged = [live] if isinstance(live, StagedTensors) else []
        are_spilled = any(map(is_spilled, inputs.gradients))
        if self._staged or are_spilled:
            kind = SpilledTensors if are_spilled else StagedTensors
            staged = kind(inputs.gradients, writable=False, traffic=traffic)
            self._gradients = staged
            self._staged.append(staged)
        self.stages = bool(self._staged)
        codes: list[StepCode] = [TorchStep(keys, inputs, live, self._gradients)]
        if kernel is not None:
            codes.insert(0, KernelStep(kernel, keys, inputs, live, self._gradients))
        self._codes = codes

    def touched(self, chunk: int) -> bool:
        """Return whether any parameter in the chunk has a gradient, or has to be written."""
        pieces = self._layout.plans[chunk].pieces
        return super().touched(chunk) or any(p.parameter in self._unwritten for p in pieces)

    def update(
        self,
        chunk: int,
        arrays: Mapping[str, torch.Tensor],
        digests: Digests | None = None,
        model: NewValues = (),
    ) -> None:
        """Step one chunk, in which `model` has the values of parameters that are in no memory."""
        if isinstance(self._live, FiledTensors):
            self._live.place(model)
        super().update(chunk, arrays, digests, model)

    def prepare(self, chunk: int) -> None:
        """Begin to copy a chunk's parameters and gradients from their device to the host."""
        keys = self._keys.of
        pieces = self._layout.plans[chunk].pieces
        if not self._copies_all:
            pieces = tuple(p for p in pieces if keys[p.parameter].is_updated)
        for tensors in self._staged:
            tensors.prepare(chunk, pieces, lambda index: keys[index].has_gradient)

    def arrive(self, chunk: int) -> None:
        """Wait until the data that `prepare` requested is in host memory."""
        for tensors in self._staged:
            tensors.arrive(chunk)

    @contextmanager
    def _loaded(
        self, chunk: int, arrays: Mapping[str, torch.Tensor], digests: Digests | None
    ) -> Iterator[LoadedChunk]:
        """Begin to send the chunk's parameters back after the block."""
        num_threads = self._pool.num_threads
        one = min(HOT_ELEMENTS, HOT_ELEMENTS_ONE_THREAD)
        most = one if num_threads == 1 else HOT_ELEMENTS
        yield LoadedChunk(chunk, arrays, digests, num_threads, most)
        for tensors in self._staged:
            tensors.leave(chunk)

    def _run(self, calls: Sequence[Call]) -> None:
        """Run the calls on the threads of the pool."""
        self._pool.run(lambda context, call: call(context), calls)

    def fence(self) -> None:
        """Make the calling thread's current streams wait for the parameters sent back so far."""
        for tensors in self._staged:
            tensors.fence()


class DeviceUpdater(ChunkUpdater):
    """Updates chunks on the device where everything is: by its kernels, the rest by torch's code.

    The update of a chunk returns when the work that was queued for it has ended. The memory that it
    used is then free for other uses, and work that is launched afterwards, on any stream, sees the
    new parameters.

    Args:
        rule: Update rule of the optimizer.
        pool: Pool whose stepper counts the steps of kernels.
        inputs: Everything that the step computes with.
        compute: Compute of the device that holds parameters, gradients and frames.

    Raises:
        UnsupportedOptimizerError: A parameter group cannot be stepped on a device; says why.
        UnsupportedParameterError: A parameter or gradient is on another device by now; names the
            parameter.
    """

    def __init__(
        self, rule: UpdateRule, pool: UpdatePool, inputs: StepInputs, *, compute: Compute
    ) -> None:
        layout, parameters, gradients = inputs.layout, inputs.parameters, inputs.gradients
        keys = StepKeys(rule, pool, inputs, may_fuse=False)
        super().__init__(layout, keys)
        self.device = compute.device
        for spec, *tensors in zip(layout.parameters, parameters, gradients, strict=True):
            for tensor in tensors:
                if tensor is not None and tensor.device != self.device:
                    raise UnsupportedParameterError(
                        f"parameter {spec.name!r}, or its gradient, is on {tensor.device} now, "
                        f"but its state was updated on {self.device} before: move it back"
                    )
        self._compute = compute
        self._live = live = FlatTensors(parameters, writable=True)
        self._gradients = FlatTensors(gradients, writable=False)
        self._begun = list(marks_of([*parameters, *gradients]).values())
        self._given: dict[int, Event] = {}
        self._context = BlockContext(rule, compute.empty)
        split = MASTER_LOW in layout.array_names
        require_steppable(rule, keys.groups, layout.state_dtype, split=split)
        self._codes = [
            DeviceStep(compute, rule, keys, inputs, live, self._gradients),
            TorchStep(keys, inputs, live, self._gradients),
        ]

    def set_gradient(self, index: int, gradient: torch.Tensor) -> None:
        """Set the gradient of a parameter that had none, in the current stream's order."""
        self._given[index] = boundary_of(gradient.device).now()
        super().set_gradient(index, gradient)

    @contextmanager
    def _loaded(
        self, chunk: int, arrays: Mapping[str, torch.Tensor], digests: Digests | None
    ) -> Iterator[LoadedChunk]:
        """Queue the block's work, digest the chunk after it, and wait until both are done."""
        compute = self._compute
        numbers = {piece.parameter for piece in self._layout.plans[chunk].pieces}
        given = numbers & self._given.keys()
        # torch reuses freed memory at once for allocations on the training's stream. Gradients are
        # therefore referenced until this chunk's work has ended.
        held = [self._gradients.tensor(number) for number in numbers]
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

    def _run(self, calls: Sequence[Call]) -> None:
        """Queue the work of all calls, in their order."""
        for call in calls:
            call(self._context)
