"""One step of an optimizer by the kernels of a device: one launch for each piece of a parameter.

AdamW, Adam and SGD have kernels that step a parameter in one pass over its state, whatever the
state is encoded as (`offload.device.kernels`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.autograd.graph import increment_version

from offload.device.compute import Compute
from offload.device.flat_tensors import FlatTensors
from offload.device.kernels.forms import KERNEL_DTYPES, DeviceBlock, DeviceScalars, form_for
from offload.update.blocks import Block, blocks, runs
from offload.update.dtypes import DTYPES
from offload.update.pool import BlockContext
from offload.update.rules import UpdateRule
from offload.update.step_code import Call, LoadedChunk, PieceNumbers
from offload.update.step_inputs import StepInputs
from offload.update.step_keys import StepKeys
from offload.update.steppable import MAX_FACTORS, why_not_by_kernel


@dataclass(frozen=True, slots=True, eq=False)
class DeviceCall:
    """The launches for one block."""

    step: DeviceStep
    block: Block

    def run(self, _: BlockContext) -> None:
        """Queue the launches."""
        self.step.launch(self.block)


class DeviceStep:
    """The part of one step that the kernels of a device take; a `StepCode`.

    Args:
        compute: Compute of the device that holds parameters, gradients and frames. The kernels that
            the step needs are compiled now.
        rule: Update rule of the optimizer.
        keys: Keys of the parameters.
        inputs: Everything that the step computes with.
        live: Live parameters.
        gradients: Gradients.
    """

    def __init__(
        self,
        compute: Compute,
        rule: UpdateRule,
        keys: StepKeys,
        inputs: StepInputs,
        live: FlatTensors,
        gradients: FlatTensors,
    ) -> None:
        self._compute = compute
        self._class = rule.optimizer_class
        self._keys = keys
        self._layout = layout = inputs.layout
        self._parameters = inputs.parameters
        self._live = live
        self._gradients = gradients
        self._reasons = [why_not_by_kernel(rule, group, inputs.factors) for group in keys.groups]
        for spec, parameter, gradient in zip(
            layout.parameters, inputs.parameters, inputs.gradients, strict=True
        ):
            if not self._reasons[spec.group]:
                # Compiled now, so that a compiler error cannot occur in the middle of a step.
                compute.prepare(
                    form_for(
                        self._class,
                        keys.groups[spec.group],
                        live=parameter.dtype,
                        gradient=_kernel_dtype(parameter if gradient is None else gradient),
                        arrays={n: DTYPES[layout.formats[n].dtype] for n in spec.arrays},
                    )
                )
        self._seed, self._rounding_step = inputs.seed, inputs.step
        self._factors = inputs.factors
        self._scalars: DeviceScalars | None = None

    def why_not(self, group: int) -> str:
        """Return why no kernel can step a group; empty if one can."""
        return self._reasons[group]

    def add_gradient(self, index: int) -> None:
        """Do nothing: the parameter's key says that it has a gradient."""

    def calls(
        self, chunk: LoadedChunk, numbers: PieceNumbers
    ) -> tuple[Sequence[Call], PieceNumbers]:
        """Take the pieces with a gradient whose group has a kernel."""
        calls: list[Call] = []
        others: list[int] = []
        for key, run in runs(self._layout, chunk.number, self._keys.of, numbers):
            if key.has_gradient and not self._reasons[key.group]:
                calls += [DeviceCall(self, b) for b in blocks(self._layout, chunk, key, run)]
            else:
                others += run
        return calls, np.array(others, dtype=np.int64)

    def done(self, chunk: LoadedChunk) -> None:
        """Do nothing: each call has already reported what it does not use any more."""

    def launch(self, block: Block) -> None:
        """Queue the step of one block."""
        key = block.key
        after = self._keys.scalars_after(key)
        count = next((int(value) for name, _, value in after if name == "step"), 1)
        for piece, device_block in zip(block.pieces, self._device_blocks(block), strict=True):
            self._compute.update(
                self._class,
                self._keys.groups[key.group],
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
                first_element=(
                    first
                    if in_element_space
                    else layout.rounding_starts[piece.parameter] + piece.start
                ),
                parameter=None if in_element_space else layout.rounding_names[piece.parameter],
                is_new=block.key.is_new,
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
