"""Stepper: runs an optimizer class's own step on tensors that are not parameters of a model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

NOT_OPTIONS = ("params", "param_names")
"""Keys of a parameter group that are no hyper-parameters."""


class Stepper:
    """Runs an optimizer class's step without hooks on flat tensors. Not for two threads at a time.

    Unless the class `keeps_groups`, each call gets a copy of the group, which it may change.
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        hyper: Mapping[str, Any],
        step: Callable[[torch.optim.Optimizer], Any],
        *,
        keeps_groups: bool = False,
    ) -> None:
        self._class = optimizer_class
        self._hyper = dict(hyper)
        self.step = step
        """Step function of the class, without hooks."""
        self._keeps_groups = keeps_groups
        placeholder = torch.zeros(1, dtype=torch.float32, device="cpu")
        self._instance = optimizer_class([placeholder], **self._hyper)
        self.options: dict[str, Any] = {}
        """Hyper-parameters as the last call left them."""

    def instance(
        self, groups: Sequence[Mapping[str, Any]], parameters: Sequence[Sequence[torch.Tensor]]
    ) -> torch.optim.Optimizer:
        """Return an optimizer of the class, for the parameters of each group."""
        filled = [
            {**options, "params": [*own]} for options, own in zip(groups, parameters, strict=True)
        ]
        return self._class(filled, **self._hyper)

    def create(
        self, parameter: torch.Tensor, gradient: torch.Tensor | None, group: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Run the first step of a flat parameter; torch creates its state."""
        (state,) = self.create_all([parameter], [gradient], group)
        return state

    def create_all(
        self,
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
        group: Mapping[str, Any],
    ) -> list[dict[str, Any]]:
        """Run the first step of several flat parameters in one call; see `create`."""
        own = self._own(group)
        instance = self.instance([own], [parameters])
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        self.step(instance)
        self._keep_options(instance)
        return [dict(instance.state[parameter]) for parameter in parameters]

    def apply(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor | None,
        state: dict[str, Any],
        group: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Run one step of a flat parameter that has state; updates it, and returns its state."""
        (state,) = self.apply_all([parameter], [gradient], [state], group)
        return state

    def apply_all(
        self,
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
        states: Sequence[dict[str, Any]],
        group: Mapping[str, Any],
    ) -> list[dict[str, Any]]:
        """Run one step of several flat parameters in one call; see `apply`."""
        instance = self._instance
        instance.param_groups = [{**self._own(group), "params": [*parameters]}]
        instance.state.clear()
        for parameter, gradient, state in zip(parameters, gradients, states, strict=True):
            parameter.grad = gradient
            instance.state[parameter] = state
        try:
            self.step(instance)
            self._keep_options(instance)
            return [instance.state[parameter] for parameter in parameters]
        finally:
            instance.state.clear()
            instance.param_groups = []

    def advance(
        self, options: Mapping[str, Any], first: Mapping[str, Any], *, has_gradient: bool
    ) -> dict[str, Any]:
        """Return the hyper-parameters that the class itself changes in a step, after the step.

        The class steps an empty tensor, so the result cannot depend on any value of a parameter.
        """
        empty = torch.zeros(0, dtype=torch.float32, device="cpu")
        gradient = empty.clone() if has_gradient else None
        if same_value(options, first):
            self.create(empty.view(-1), gradient, options)
        else:  # the class finds its group as after a step, and so must find state
            state = self.create(empty.view(-1), empty.clone(), first)
            self.apply(empty.view(-1), gradient, state, options)
        return changes(options, self.options)

    def _own(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return hyper-parameters that the class may change."""
        options = {k: v for k, v in group.items() if k not in NOT_OPTIONS}
        return options if self._keeps_groups else copy.deepcopy(options)

    def _keep_options(self, instance: torch.optim.Optimizer) -> None:
        if not self._keeps_groups:
            (group,) = instance.param_groups
            self.options = {k: v for k, v in group.items() if k not in NOT_OPTIONS}


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyper-parameters that a class has changed or added, with their new values."""
    for key in before:
        if key not in NOT_OPTIONS and key not in after:
            raise KeyError(key)
    return {
        key: value
        for key, value in after.items()
        if key not in NOT_OPTIONS and (key not in before or not same_value(before[key], value))
    }


def same_value(one: object, other: object) -> bool:
    """Return whether two hyper-parameters have the same type and value, or are both NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same_value(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same_value, one, other))
    return one is other or bool(one == other) or (one != one and other != other)


def differing(found: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    """Return why one block's change of its group is not that of all blocks; empty if it is."""
    for name in [*expected, *found]:
        if not (name in expected and name in found and same_value(found[name], expected[name])):
            return (
                f"its step changes group[{name!r}] to a value that depends on parameters or "
                "gradients, and a chunk has only some of them"
            )
    return ""


def first_options(
    options: Mapping[str, Any], first: Mapping[str, Any], changed: Iterable[str]
) -> dict[str, Any]:
    """Return hyper-parameters as before the first step."""
    kept = {name: value for name, value in options.items() if name not in changed}
    return kept | {name: first[name] for name in changed if name in first}
