"""Keys of a step's parameters, and torch's count of the step, once for each key.

Parameters with the same hyper-parameters, dtype and scalar state have the same key. Torch's own
step computes their scalar state, such as the number of the step, which is then the same for all of
them. A kernel computes no scalar state. If a kernel steps all elements of a key, torch steps an
empty tensor instead.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from offload.device.boundary import is_on_device, to_host
from offload.errors import UnsupportedOptimizerError
from offload.format._manifest_fields import without_numpy
from offload.format.layout import Layout
from offload.format.rounding_keys import ParameterKeys, name_numbers
from offload.update.kept_state import Scalars, read_scalars, unknown_state, write_scalars
from offload.update.pool import BlockContext, UpdatePool
from offload.update.rules import FUSED_MULTIPLE, UpdateRule
from offload.update.stepper import NOT_OPTIONS, changes, differing, same_value


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepInputs:
    """The tensors, hyper-parameters and numbers that one step computes with.

    Sequences of parameters, gradients and scalars have one item for each parameter of the layout,
    in element-space order. An updater does not keep this object, so that a gradient's memory is
    free as soon as it has been applied.
    """

    layout: Layout
    """Place of every parameter in the state arrays."""

    groups: Sequence[Mapping[str, Any]]
    """``param_groups`` at this step."""

    parameters: Sequence[torch.Tensor]
    """Live parameters, updated in place."""

    gradients: Sequence[torch.Tensor | None]
    """Gradient of each parameter, of any floating-point dtype; None if it has none."""

    scalars: Sequence[Scalars | None]
    """Scalar state of each parameter; None for a parameter that has no state yet."""

    step: int
    """Number of this step, from 1."""

    seed: int = 0
    """Seed of stochastic rounding, if state is stored with it."""

    factors: Sequence[float] = ()
    """Factors that each gradient is multiplied by in turn, in FP32."""

    def rounding_keys(self, arrays: Sequence[str]) -> list[ParameterKeys]:
        """Return the keys by which this step rounds each of these state arrays."""
        names = name_numbers(self.layout.rounding_names)
        return [ParameterKeys(names, self.seed, array, self.step) for array in arrays]


class Key(NamedTuple):
    """Properties that neighbouring parameters must share to be stepped in one call."""

    group: int
    dtype: torch.dtype
    scalars: Scalars | None
    """Scalar state before the step; None without state."""

    has_gradient: bool

    @property
    def is_new(self) -> bool:
        """Whether there is no state yet."""
        return self.scalars is None

    @property
    def is_updated(self) -> bool:
        """Whether the step changes the state. State without a gradient is left as it is."""
        return self.scalars is None or self.has_gradient


class StepKeys:
    """Keys and hyper-parameters of one step, and the scalar state of each key after it."""

    def __init__(
        self, rule: UpdateRule, pool: UpdatePool, inputs: StepInputs, *, may_fuse: bool
    ) -> None:
        # Copied by value: a scheduler may change a tensor in place while the step is in progress.
        self.groups: list[dict[str, Any]] = [
            {k: _by_value(v) for k, v in g.items() if k not in NOT_OPTIONS} for g in inputs.groups
        ]
        """Hyper-parameters of each group."""
        self.rules = [rule.rule(group) for group in self.groups]
        """State that torch keeps for each group."""
        self.of = _keys(inputs)
        """Key of each parameter. Neighbours that have equal keys share one object."""
        self._rule = rule
        self._changes = [] if rule.is_torchs else [rule.advance(group) for group in self.groups]
        self._fused = [rule.fused(group) if may_fuse else None for group in self.groups]
        self._pool = pool
        self._before = list(inputs.scalars)
        self._after: dict[Key, Scalars] = {}

    def add_gradient(self, index: int) -> None:
        """Note that a parameter that had no gradient has received one."""
        self.of[index] = self.of[index]._replace(has_gradient=True)

    def step(
        self,
        context: BlockContext,
        key: Key,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        views: Mapping[str, torch.Tensor],
    ) -> None:
        """Run torch's own step on some elements of a key, and record the key's scalar state."""
        group, fused = self.groups[key.group], self._fused[key.group]
        # A new object for every block: otherwise torch's step would find the last block's .grad.
        stepped = parameter.view(-1)
        if key.scalars is None:
            state = context.stepper.create(stepped, gradient, group)
        elif fused is not None:
            state = step_fused(context, stepped, gradient, views, key.scalars, fused)
        else:
            state = {**views, **write_scalars(key.scalars)}
            state = context.stepper.apply(stepped, gradient, state, group)
        if stepped.data_ptr() != parameter.data_ptr():  # the class has set .data
            parameter.copy_(stepped)
        for name, view in views.items():
            value = state.get(name)
            if value is None:
                view.zero_()
            elif value is not view:
                view.copy_(value)
        if not self._rule.is_torchs:
            self._require_as_tried(context, key, state)
        if key not in self._after:  # every block of a key ends with the same scalars
            self._after[key] = read_scalars(state, self.rules[key.group])

    def _require_as_tried(self, context: BlockContext, key: Key, state: Mapping[str, Any]) -> None:
        """Check that a block of a class of the user was stepped as all other blocks are."""
        rule, group = self.rules[key.group], self.groups[key.group]
        why = unknown_state(state, rule)
        why = why or differing(changes(group, context.stepper.options), self._changes[key.group])
        if not why and key in self._after:
            is_same = same_value(read_scalars(state, rule), self._after[key])
            why = "" if is_same else "chunks of a parameter leave different numbers in its state"
        if why:
            raise UnsupportedOptimizerError(
                f"{self._rule.optimizer_class.__name__} cannot be offloaded: {why}. Its trial at "
                "construction did not show this. Keep this optimizer in memory"
            )

    def scalars_after(self, key: Key) -> Scalars:
        """Return the scalar state of a key after the step, while nothing else uses the pool.

        If torch has stepped no element of the key yet, it counts the step now.
        """
        if key not in self._after:
            self._count([key])
        return self._after[key]

    def finish(self) -> list[Scalars | None]:
        """Return the scalar state of each parameter after the step; nothing else uses the pool."""
        keys = {id(key): key for key in self.of}  # most parameters share theirs
        missing = {k for k in keys.values() if k.has_gradient and k not in self._after}
        if missing:  # only empty parameters have these keys: torch counts their steps all the same
            self._count(missing)
        after = {number: self._after[key] for number, key in keys.items() if key in self._after}
        return [
            after.get(id(key), before) for key, before in zip(self.of, self._before, strict=True)
        ]

    def _count(self, keys: Iterable[Key]) -> None:
        """Let torch step an empty tensor of each key, which counts the step."""
        context = self._pool.context
        for key in keys:
            empty = torch.empty(0, dtype=torch.float32, device="cpu")
            views = {name: empty.clone() for name in self.rules[key.group].arrays}
            self.step(context, key, empty, empty.clone(), views)


def _keys(inputs: StepInputs) -> list[Key]:
    keys: list[Key] = []
    last: Key | None = None
    given = zip(
        inputs.layout.parameters, inputs.parameters, inputs.gradients, inputs.scalars, strict=True
    )
    for spec, parameter, gradient, scalars in given:
        key = (spec.group, parameter.dtype, scalars, gradient is not None)
        if key != last:
            last = Key(*key)
        keys.append(last)
    return keys


def _by_value(value: object) -> object:
    if type(value) in (bool, int, float, str, type(None)):
        return value
    if type(value) is tuple:
        return tuple(map(_by_value, value))
    value = without_numpy(value)
    # Every block reads the hyper-parameters. A read from a device would wait for the device's work.
    if isinstance(value, torch.Tensor) and is_on_device(value):
        return to_host(value)
    return copy.deepcopy(value)


def step_fused(
    context: BlockContext,
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    views: Mapping[str, torch.Tensor],
    scalars: Scalars,
    group: Mapping[str, Any],
) -> dict[str, Any]:
    """Run torch's fused step in whole vectors, so that the cuts between blocks do not matter."""
    length = len(parameter)
    rest = length % FUSED_MULTIPLE
    if not rest and _is_plain(parameter) and _is_plain(gradient):
        state = {**views, **write_scalars(scalars)}
        return context.stepper.apply(parameter, gradient, state, group)

    def padded(name: str, values: torch.Tensor) -> torch.Tensor:
        """Return a copy of values that is a multiple of a vector long, with zeros at the end."""
        out = context.buffer(f"padded {name}", torch.float32, length + FUSED_MULTIPLE - rest)
        out[:length] = values
        out[length:] = 0
        return out

    stepped = padded("parameter", parameter).view(-1)
    arrays = {name: padded(name, view) for name, view in views.items()}
    state = {**arrays, **write_scalars(scalars)}
    context.stepper.apply(stepped, padded("gradient", gradient), state, group)
    parameter.copy_(stepped[:length])
    for name, view in views.items():
        view.copy_(arrays[name][:length])
    return {**state, **views}


def _is_plain(values: torch.Tensor) -> bool:
    """Return whether values are in memory end to end; torch's fused code supposes it, unchecked."""
    return values.is_contiguous() and not (values.is_neg() or values._is_zerotensor())
