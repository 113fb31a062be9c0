"""Steps on a server that run beside the model's next forward (``overlap="forward"``).

The hooks and the background pass are those of local steps. The pass exchanges gradients and
parameters with the server, where a local one updates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from offload.format.layout import Layout
from offload.model.parameters import Trainable
from offload.overlap.background_pass import RunningPass
from offload.overlap.forward import copy_shared_gradients
from offload.overlap.forward_hooks import ForwardHooks
from offload.stream.meter import Meter

Exchange = Callable[[Sequence[int] | None, Callable[[int], object]], None]
"""Function that takes a step on the server: in an order of chunks, if one is known. It calls a
function with each chunk whose parameters are here."""


class _Pass:
    """One exchange with the server, in the place of a pass over state."""

    updater = SimpleNamespace(fence=lambda: None)
    """The exchange copies to a device, if at all, in the order of the training's stream."""

    def __init__(self, chunks: Sequence[int], exchange: Exchange, step: int) -> None:
        self.chunks = chunks
        self.step = step
        self._exchange = exchange

    def run(self, updated: Callable[[int], object]) -> list[None]:
        """Exchange everything."""
        # The parameters are watched, and whoever uses a watched one waits for this thread.
        with torch._C.DisableTorchFunctionSubclass():
            self._exchange(self.chunks, updated)
        return []


class NearForward:
    """Runs steps beside the next forward of a model.

    Args:
        model: Module that is called in training.
        parameters: Function that returns the server's layout with its parameters in order, or None
            if the server has not said yet how it lays them out.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: Callable[[], tuple[Layout, Sequence[torch.Tensor]] | None],
    ) -> None:
        self._hooks = ForwardHooks(model)
        self._parameters = parameters
        self._running: RunningPass | None = None
        self._meter = Meter()

    @property
    def running_step(self) -> int:
        """Number of the step that runs; 0 if none does, or if it has failed."""
        running = self._running
        return 0 if running is None or running.ended else running.state_pass.step

    def require_closures(self) -> None:
        """Do nothing: `step` evaluates closures before it begins."""

    def require_unscaled(self) -> None:
        """Do nothing: gradients leave in `step`."""

    def attach(self, groups: object) -> None:  # noqa: ARG002  (as other strategies)
        """Put hooks on the model."""
        self._hooks.attach()

    def before_hooks(self) -> None:
        """Wait for the running step before the user's hooks, if parameters are not watched."""
        if not self._hooks.sees_readers:
            self._hooks.wait()

    def join(self) -> None:
        """Wait for the running step, and raise its error."""
        running, self._running = self._running, None
        if running is not None:
            running.join()
            self._hooks.release()
            running.raise_error()

    def step(
        self,
        step: int,
        gradients: Mapping[int, torch.Tensor],
        exchange: Callable[[Mapping[int, torch.Tensor]], Exchange],
    ) -> None:
        """Begin a step; it is taken at once if the server's layout is not known.

        Args:
            step: Number of the step.
            gradients: Gradient of each parameter that has one, by the parameter's id.
            exchange: Function that returns the exchange for some gradients.
        """
        known = self._parameters()
        if known is None:
            exchange(gradients)(None, lambda _: None)
            return
        layout, parameters = known
        trainables = [
            Trainable(spec, p) for spec, p in zip(layout.parameters, parameters, strict=True)
        ]
        ordered = [gradients.get(id(p)) for p in parameters]
        must_wait = self._hooks.plan(layout, trainables, ordered)
        for parameter, gradient in zip(parameters, ordered, strict=True):
            if gradient is not None:
                parameter.grad = None
        del gradients
        copy_shared_gradients(ordered)
        kept = {id(p): g for p, g in zip(parameters, ordered, strict=True) if g is not None}
        chunks = self._hooks.order or range(layout.num_chunks)
        state_pass: Any = _Pass(chunks, exchange(kept), step)
        running = RunningPass(
            state_pass, lambda *_: None, lambda _, error: error, self._meter, updated=None
        )
        must_wait += self._hooks.begin(running)
        self._running = running
        running.start()
        self._hooks.wait_for(must_wait)

    def end(self) -> None:
        """Wait for the running step, and remove the hooks from the model."""
        try:
            self.join()
        finally:
            self._hooks.remove()
