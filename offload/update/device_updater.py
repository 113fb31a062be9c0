"""The arithmetic of one chunk in device memory, on the device of the parameters.

AdamW, Adam and SGD have kernels that step a parameter in one pass over its state, whatever the
state is encoded as. Other classes run torch's own step on flat views of whole runs, as
`offload.update.updater` does on the CPU. Such classes need state that is stored as FP32, because
the codecs are exact on a CPU only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch.autograd.graph import increment_version

from offload.device.boundary import Event, boundary_of, marks_of
from offload.device.compute import Compute
from offload.device.flat_tensors import FlatTensors
from offload.device.kernels.forms import (
    KERNEL_DTYPES,
    DeviceBlock,
    DeviceScalars,
    form_for,
)
from offload.device.staging import Traffic
from offload.errors import UnsupportedParameterError
from offload.format.arrays import MASTER_LOW
from offload.format.digests import Digests
from offload.update.dtypes import DTYPES
from offload.update.pool import BlockContext, UpdatePool
from offload.update.rules import UpdateRule
from offload.update.step_inputs import StepInputs
from offload.update.steppable import MAX_FACTORS, require_steppable, why_not_by_kernel
from offload.update.updater import Block, ChunkUpdater

_RUN_ELEMENTS = 16 << 20
"""Elements of one call of torch's own step: few calls, and bounded temporary memory."""


class DeviceUpdater(ChunkUpdater):
    """Updates the chunks of one step in device memory.

    `update` returns when the work has ended. The memory that it used is then free for other uses,
    and work that is launched afterwards, on any stream, sees the new parameters.

    Args:
        compute: Compute of the device that holds parameters, gradients and frames.

    The other arguments are those of `ChunkUpdater`.

    Raises:
        UnsupportedOptimizerError: A parameter group cannot be stepped on a device; says why.
        UnsupportedParameterError: A parameter or gradient is on another device by now; names the
            parameter.
    """

    def __init__(
        self,
        rule: UpdateRule,
        pool: UpdatePool,
        inputs: StepInputs,
        *,
        compute: Compute,
        traffic: Traffic | None = None,
    ) -> None:
        super().__init__(rule, pool, inputs, traffic=traffic)
        layout, parameters, gradients = inputs.layout, inputs.parameters, inputs.gradients
        self.device = compute.device
        for spec, *tensors in zip(layout.parameters, parameters, gradients, strict=True):
            for tensor in tensors:
                if tensor is not None and tensor.device != self.device:
                    raise UnsupportedParameterError(
                        f"parameter {spec.name!r}, or its gradient, is on {tensor.device} now, "
                        f"but its state was updated on {self.device} before: move it back"
                    )
        self._compute = compute
        self._parameters = parameters
        self._live = FlatTensors(parameters, writable=True)
        self._gradients = FlatTensors(gradients, writable=False)
        self._staged = []
        self._fused = [None] * len(self._fused)
        self._begun = list(marks_of([*parameters, *gradients]).values())
        self._given: dict[int, Event] = {}
        self._context = BlockContext(rule, compute.empty)
        split = MASTER_LOW in layout.array_names
        require_steppable(rule, self._hyper, layout.state_dtype, split=split)
        self._has_kernel = [
            not why_not_by_kernel(rule, group, inputs.factors) for group in self._hyper
        ]
        for spec, live, gradient in zip(layout.parameters, parameters, gradients, strict=True):
            if self._has_kernel[spec.group]:
                # Compiled now, so that a compiler error cannot occur in the middle of a step.
                self._compute.prepare(
                    form_for(
                        self._class,
                        self._hyper[spec.group],
                        live=live.dtype,
                        gradient=_kernel_dtype(live if gradient is None else gradient),
                        arrays={n: DTYPES[layout.formats[n].dtype] for n in spec.arrays},
                    )
                )
        self._seed, self._rounding_step = inputs.seed, inputs.step
        self._scalars: DeviceScalars | None = None

    def set_gradient(self, index: int, gradient: torch.Tensor) -> None:
        """Set the gradient of a parameter that had none, in the current stream's order.

        Its values are those that the work queued on the current stream so far computes.
        """
        super().set_gradient(index, gradient)
        self._given[index] = boundary_of(gradient.device).now()

    def prepare(self, chunk: int) -> bool:  # noqa: ARG002
        """Return False: everything is on the device already."""
        return False

    def update(
        self, chunk: int, arrays: Mapping[str, torch.Tensor], digests: Digests | None = None
    ) -> None:
        """Step one chunk, digest it, and wait until both are done."""
        compute = self._compute
        numbers = {piece.parameter for piece in self._layout.plans[chunk].pieces}
        given = numbers & self._given.keys()
        # torch reuses freed memory at once for allocations on the training's stream. Gradients are
        # therefore referenced until this chunk's work has ended.
        held = [self._gradients.tensor(number) for number in numbers]
        with compute.queue([*self._begun, *(self._given[index] for index in given)]):
            try:
                for block in self._blocks(chunk, arrays):
                    self._update(self._context, block)
                if digests is not None:
                    for name, array in arrays.items():
                        digests.written(name, 0, array.nbytes)
            finally:  # also after an error, because the caller is about to reuse this memory
                done = compute.mark()
                compute.wait(done)
                held.clear()

    def _block_elements(self) -> int:
        return _RUN_ELEMENTS

    def _update(self, context: BlockContext, block: Block) -> None:
        key = block.key
        if not (key.has_gradient and self._has_kernel[key.group]):
            super()._update(context, block)
            return
        if key not in self._stepped:
            self._step_scalars(context, block)  # torch counts the step
        count = next((int(v) for name, _, v in self._stepped[key] if name == "step"), 1)
        for piece, device_block in zip(block.pieces, self._device_blocks(block), strict=True):
            self._compute.update(
                self._class,
                self._hyper[key.group],
                device_block,
                step=count,
                seed=self._seed,
                rounding_step=self._rounding_step,
                scalars=self._device_scalars(),
            )
            increment_version(self._parameters[piece.parameter])
        self._live.finish(block.pieces)
        self._gradients.finish(block.pieces)

    def _device_blocks(self, block: Block) -> Iterator[DeviceBlock]:
        """Yield the pieces of a block, one for each launch of a kernel."""
        layout, pieces = self._layout, block.pieces
        in_element_space = layout.counts_from == "chunk"
        ends = dict.fromkeys(block.stored, 0)
        views = zip(pieces, self._live.views(pieces), self._gradients.views(pieces), strict=True)
        for piece, live, gradient in views:
            arrays = {}
            for name, stored in block.stored.items():
                start = ends[name]
                # If a value stands for several elements, they are counted anew in each piece.
                ends[name] += -(-(piece.stop - piece.start) // layout.formats[name].block)
                arrays[name] = stored[start : ends[name]]
            first = block.first + piece.at - pieces[0].at
            yield DeviceBlock(
                live=live,
                gradient=gradient.to(_kernel_dtype(gradient)).contiguous(),
                arrays=arrays,
                first_element=first if in_element_space else piece.start,
                parameter=None if in_element_space else layout.parameters[piece.parameter].name,
                is_new=block.key.scalars is None,
            )

    def _device_scalars(self) -> DeviceScalars:
        if self._scalars is None:
            factors = [self._compute.number(factor) for factor in self._factors]
            self._scalars = DeviceScalars(
                inverse_scale=factors[0] if factors else None,
                clip=factors[1] if len(factors) == MAX_FACTORS else None,
            )
        return self._scalars


def _kernel_dtype(gradient: torch.Tensor) -> torch.dtype:
    """Return the dtype to which a gradient is converted for the kernels."""
    return gradient.dtype if gradient.dtype in KERNEL_DTYPES else torch.float32
