"""Stepper: runs an optimizer class's own step on tensors that are not parameters of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


class Stepper:
    """Runs an optimizer class's step on flat tensors. Not for two threads at a time.

    Args:
        optimizer_class: A torch optimizer class.
        hyper: Keyword arguments of its constructor.
        step: Step function of the class, without hooks.
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        hyper: Mapping[str, Any],
        step: Callable[[torch.optim.Optimizer], Any],
    ) -> None:
        self._class = optimizer_class
        self._hyper = dict(hyper)
        self._step = step
        placeholder = torch.zeros(1, dtype=torch.float32, device="cpu")
        self._instance = optimizer_class([placeholder], **self._hyper)

    def create(
        self, parameter: torch.Tensor, gradient: torch.Tensor, group: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Run the first step of a flat parameter; torch creates its state.

        Args:
            parameter: Flat FP32 values, updated in place.
            gradient: Flat FP32 gradient of the same length.
            group: Hyper-parameters as in ``param_groups``.

        Returns:
            The state that torch created: tensors like `parameter`, and scalars.
        """
        (state,) = self.create_all([parameter], [gradient], group)
        return state

    def create_all(
        self,
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        group: Mapping[str, Any],
    ) -> list[dict[str, Any]]:
        """Run the first step of several flat parameters in one call; see `create`.

        Returns:
            The state of each parameter.
        """
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        instance = self._class([{**options, "params": [*parameters]}], **self._hyper)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        self._step(instance)
        return [dict(instance.state[parameter]) for parameter in parameters]

    def apply(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        state: dict[str, Any],
        group: Mapping[str, Any],
    ) -> None:
        """Run one step of a flat parameter that has state; updates `parameter` and `state`."""
        self.apply_all([parameter], [gradient], [state], group)

    def apply_all(
        self,
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        states: Sequence[dict[str, Any]],
        group: Mapping[str, Any],
    ) -> None:
        """Run one step of several flat parameters in one call; see `apply`."""
        instance = self._instance
        instance.param_groups = [{**group, "params": [*parameters]}]
        instance.state.clear()
        for parameter, gradient, state in zip(parameters, gradients, states, strict=True):
            parameter.grad = gradient
            instance.state[parameter] = state
        try:
            self._step(instance)
        finally:
            instance.state.clear()
            instance.param_groups = []
