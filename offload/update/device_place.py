"""Updates in device memory: one stream of the device that holds parameters, gradients and state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from offload.device.boundary import Event, boundary_of, marks_of
from offload.device.compute import Compute
from offload.device.staging import FlatTensors
from offload.errors import UnsupportedParameterError
from offload.format.digests import Digests
from offload.update.pool import BlockContext
from offload.update.rules import UpdateRule
from offload.update.step_code import Call, LoadedChunk
from offload.update.step_inputs import StepInputs

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
