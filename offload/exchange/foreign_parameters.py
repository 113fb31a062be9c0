"""Parameters of another program's checkpoint, matched by name with their tensors and their state.

The optimizer's state dict of such a checkpoint has parameters by number or by name. The model's
state dict has tensors by name.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from offload.errors import CheckpointError, MismatchError
from offload.exchange.foreign import ForeignCheckpoint
from offload.exchange.torch_dicts import (
    MAX_STEPS,
    NO_ENTRY,
    num_steps,
    read_parameter_state,
    scalar_template,
)
from offload.format._manifest_fields import TENSOR_DTYPES, encode_group
from offload.format.layout import ParameterSpec
from offload.format.strict_json import short
from offload.options import Options
from offload.update.coding.filler import ParameterState, TensorSource
from offload.update.dtypes import DTYPE_CODES
from offload.update.hyperparameters import misfit
from offload.update.kept_state import Rule, Scalars
from offload.update.rules import UpdateRule


@dataclass(slots=True)
class ForeignParameter:
    """A trainable parameter of another program's checkpoint."""

    spec: ParameterSpec
    """Description of the parameter in the new store's layout."""

    state: ParameterState

    value: TensorSource
    """Values that the live parameter is rounded from."""


def with_ties(foreign: ForeignCheckpoint, tied: Mapping[str, str]) -> ForeignCheckpoint:
    """Return a checkpoint with only one copy of the tensors that are tied in the model."""
    for alias, name in tied.items():
        first, second = foreign.model.get(name), foreign.model.get(alias)
        if first is None or (second is not None and second.shape != first.shape):
            raise MismatchError(
                f"{foreign.path}: {alias!r} and {name!r} cannot be tied: their shapes differ, or "
                f"the source has no {name!r}"
            )
    model = {name: source for name, source in foreign.model.items() if name not in tied}
    return replace(foreign, model=model, aliases={**foreign.aliases, **tied})


def match_parameters(
    foreign: ForeignCheckpoint,
    rule: UpdateRule,
    names: Sequence[str] | None,
    frozen: Collection[str],
    dtype: torch.dtype | None,
    options: Options,
) -> tuple[list[dict[str, Any]], list[ForeignParameter], list[list[str]]]:
    """Find the name, the tensor and the state of each parameter of the optimizer."""
    saved = rule.without_flags(foreign.optimizer["param_groups"], foreign.path)
    order = _names(foreign, saved, names)
    groups, found = [], []
    seen: set[str] = set()
    for index, (values, members) in enumerate(zip(saved, order, strict=True)):
        hyper = _hyperparameters(foreign.path, index, values, rule.defaults)
        _check_class(foreign, index, hyper, rule)
        kept = rule.rule(hyper)
        template = scalar_template(rule, hyper, kept)
        groups.append(hyper)
        for key, name in zip(values["params"], members, strict=True):
            if name in seen:
                raise MismatchError(f"{foreign.path}: parameter {name!r} is in two groups")
            seen.add(name)
            if name in frozen:
                continue
            found.append(_parameter(foreign, key, name, index, kept, template, dtype, options))
    return groups, found, order


def _parameter(
    foreign: ForeignCheckpoint,
    key: Any,
    name: str,
    group: int,
    kept: Rule,
    template: Scalars,
    dtype: torch.dtype | None,
    options: Options,
) -> ForeignParameter:
    """Return one parameter: its state by `key`, and its tensor by `name`."""
    name_in_model = foreign.aliases.get(name, name)
    value = foreign.model.get(name_in_model)
    if value is None:
        raise MismatchError(
            f"{foreign.path}: the optimizer has a parameter {name!r}, but the model has none of "
            "that name"
        )
    wanted = dtype or value.dtype
    code = DTYPE_CODES.get(wanted, str(wanted))
    if code not in ("F32", "BF16", "F16"):
        raise MismatchError(f"{foreign.path}: parameter {name!r} is {wanted}; expected a float")
    master = foreign.masters.get(key)
    if master is None and value.dtype == torch.float32 != wanted:
        master = value
    if code == "F32":
        value, master = master or value, None
    state = read_parameter_state(
        f"state of {name!r} in {foreign.path}",
        foreign.optimizer["state"].get(key, NO_ENTRY),
        master,
        value.shape,
        kept,
        template,
    )
    arrays = options.state_format.stored_arrays(code, kept.arrays)
    spec = ParameterSpec(name_in_model, code, value.shape, group, arrays)
    return ForeignParameter(spec, state, value)


def _names(
    foreign: ForeignCheckpoint, saved: Sequence[Mapping[str, Any]], names: Sequence[str] | None
) -> list[list[str]]:
    """Return the names of each group's parameters.

    The names come from the first of these sources that has them: `names`, the keys of the state
    dict, its ``param_names``, and the order of the model's tensors.
    """
    members = [list(group["params"]) for group in saved]
    if names is not None:
        if len(names) != sum(map(len, members)):
            raise MismatchError(
                f"{foreign.path}: the optimizer has {sum(map(len, members))} parameters, but "
                f"{len(names)} names were given"
            )
        rest = iter(names)
        return [[next(rest) for _ in group] for group in members]
    if all(isinstance(key, str) for group in members for key in group):
        return members
    if all(len(g.get("param_names", ())) == len(m) for g, m in zip(saved, members, strict=True)):
        return [list(group["param_names"]) for group in saved]
    if len(members) == 1 and len(members[0]) == len(foreign.model) and foreign.is_ordered:
        return [list(foreign.model)]
    raise MismatchError(
        f"{foreign.path}: the optimizer's parameters have numbers only, which cannot be matched "
        f"with the model's {len(foreign.model)} tensors. Give their names with --names (names= in "
        "Python), in the order of the optimizer's groups, or save param_names by constructing the "
        "optimizer with named_parameters()"
    )


def _check_class(
    foreign: ForeignCheckpoint, index: int, hyper: Mapping[str, Any], rule: UpdateRule
) -> None:
    """Refuse to import state of Adam as AdamW or the reverse, although both look the same."""
    flag = "decoupled_weight_decay"
    expected = rule.defaults.get(flag)
    if rule.class_name.endswith((".Adam", ".AdamW")) and hyper.get(flag) != expected:
        raise MismatchError(
            f"{foreign.path}: group {index} has {flag}={hyper.get(flag)}, and "
            f"{rule.optimizer_class.__name__} has {flag}={expected}: pass the other one of Adam "
            "and AdamW as the class"
        )


def step_count(
    given: int | None, foreign: ForeignCheckpoint, parameters: Sequence[ForeignParameter]
) -> int:
    """Return the number of optimizer steps that the state has seen.

    This is `given`, or else the number that the checkpoint states, or else the largest ``step`` of
    a parameter.
    """
    by_state = num_steps([p.state.scalars for p in parameters])
    if given is not None:
        return _checked_step_count(given, "step")
    if foreign.step is not None:
        return _checked_step_count(foreign.step, foreign.step_from)
    return by_state or 0


def check_model(path: str, model: Mapping[str, Any]) -> None:
    """Refuse another program's model with a tensor whose dtype no checkpoint can hold."""
    for name, source in model.items():
        if source.dtype not in DTYPE_CODES:
            raise CheckpointError(
                f"{path}: {name!r:.80} is {source.dtype}, which a checkpoint cannot hold"
            )


def _hyperparameters(
    path: str, index: int, group: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the checked hyper-parameters of a group, completed by the defaults of the class."""
    found = {
        key: _read_value(f"{path}: param_groups[{index}][{key!r:.80}]", value)
        for key, value in group.items()
        if key not in ("params", "param_names")
    }
    try:
        encode_group(index, found)
    except TypeError as error:
        raise CheckpointError(f"{path}: {error}") from error
    hyper = {**defaults, **found}
    if problem := misfit([hyper], defaults):
        raise CheckpointError(f"{path}: group {index}: {problem}")
    return hyper


def _checked_step_count(value: Any, where: str) -> int:
    """Return a number of optimizer steps, which may have any of several types in a file."""
    if hasattr(value, "read") and math.prod(value.shape) == 1:
        value = value.read(0, 1).item()
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= MAX_STEPS or value != int(value):
        raise CheckpointError(
            f"{where} is {short(value)}, expected a number of optimizer steps from 0 to "
            f"{MAX_STEPS}: if you know the number, pass it with --step (step= in Python)"
        )
    return int(value)


def _read_value(where: str, value: Any) -> Any:
    """Return a hyper-parameter. If it is a tensor in a file, read it."""
    if not hasattr(value, "read"):
        return value
    name = str(value.dtype).removeprefix("torch.")
    if math.prod(value.shape) != 1 or name not in TENSOR_DTYPES:
        raise CheckpointError(
            f"{where} is a tensor of {name} and shape {list(value.shape)}, expected one real number"
        )
    return value.read(0, 1).reshape(value.shape)
