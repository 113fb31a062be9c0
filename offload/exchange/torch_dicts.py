"""Conversion between a store's state and torch's own state dict, for other programs.

The dictionary has the form of the wrapped class: ``state``, keyed by the numbers of parameters,
with FP32 arrays and scalars, and ``param_groups``. It has two more keys, which torch's
`load_state_dict` ignores. `MASTERS` has the FP32 values of parameters that are live in 16 bits, by
the same numbers. `NUM_STEPS` has the number of optimizer steps.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeAlias

import torch

from offload.errors import MismatchError
from offload.format._manifest_fields import MAX_COUNT, NOT_HYPERPARAMETERS
from offload.format.arrays import MASTER
from offload.model.parameters import Trainable
from offload.model.shards import Shard, is_dtensor
from offload.update.coding.filler import HeldTensor, ParameterState, TensorSource
from offload.update.kept_state import Rule, Scalars, kind_of_tensor, read_scalars, write_scalars
from offload.update.rules import UpdateRule

MASTERS = "master"
"""Key in a full state dict: its value has the FP32 parameters by number."""

NUM_STEPS = "num_steps"
"""Key in a full state dict: its value is the number of optimizer steps taken. The ``step`` of a
parameter may be smaller, since it does not count steps in which the parameter has no gradient."""

NO_ENTRY: Mapping[str, Any] = {}
"""Placeholder for the missing entry of a parameter that has never been stepped."""

Part: TypeAlias = Callable[[str, torch.Tensor], torch.Tensor]
"""Function that returns this rank's part of a tensor of state. It is given what the tensor is, for
messages, and the tensor, which has the shape of the whole parameter."""

_STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class StateOnStorage(defaultdict[torch.Tensor, Any]):
    """Value of `torch.optim.Optimizer.state` while the state is on storage: an empty, truthy dict.

    torch.distributed.checkpoint asks ``if optimizer.state``. If that is false, it takes a step with
    gradients of zero to make the state of a new optimizer. This step would change the state on
    storage.
    """

    def __init__(self) -> None:
        super().__init__(_OnStorage)

    def __bool__(self) -> bool:
        return True


class _OnStorage(dict[str, Any]):
    """State of one parameter while it is on storage: an empty dict.

    Looking up a key raises a `KeyError` that says how to get the values.
    """

    def __missing__(self, key: str) -> NoReturn:
        raise KeyError(
            f"{key}: the state of parameters is on storage, not in optimizer.state. Within `with "
            "optimizer.materialized():` it is here, with several ranks if all of them are in the "
            "block; offload.read_state(checkpoint, name) reads that of one parameter from a "
            "checkpoint, and offload.integrations.dcp.CheckpointReader loads one into torch's own "
            "state dicts on any number of ranks"
        )


@dataclass(frozen=True, slots=True, eq=False)
class HeldParameter:
    """A parameter whose state is held in memory."""

    name: str

    parameter: torch.Tensor

    group: int
    """Index of its parameter group."""

    scalars: Scalars | None
    """Scalar state; None if the parameter has no state yet."""

    arrays: Sequence[str]
    """Names of the state arrays that the optimizer keeps."""


class MaterializedState:
    """The state in memory, in torch's own form.

    Tensors are like the parameter: with several ranks, those of a DTensor are DTensors of its mesh
    and placements, with this rank's shard.

    Args:
        held: The parameters.
        initial: State that torch's constructor makes, for each parameter group.
    """

    def __init__(self, held: Sequence[HeldParameter], initial: Sequence[Mapping[str, Any]]) -> None:
        self.held = held
        self.state: dict[torch.Tensor, dict[str, Any]] = {}
        self.masters: dict[torch.Tensor, torch.Tensor] = {}
        for one in held:
            parameter = one.parameter
            if one.scalars is None:
                state = unstepped_state(initial[one.group], parameter)
            else:
                state = write_scalars(one.scalars)
                state.update({name: _empty(parameter) for name in one.arrays})
            if state:  # torch has no entry for parameters of an SGD without momentum
                self.state[parameter] = state
            if parameter.dtype != torch.float32:
                self.masters[parameter] = _empty(parameter)

    def copy(self, trainable: Trainable, start: int, values: Mapping[str, torch.Tensor]) -> None:
        """Copy one block of a parameter's state into the tensors in memory; see `DecodedBlock`.

        Args:
            trainable: The parameter, of which this rank may step a part.
            start: First element of the block.
            values: Flat FP32 values by the name of the array.
        """
        shard = trainable.shard
        for name, block in values.items():
            tensor = self._tensor(trainable.parameter, name)
            memory = tensor if shard is None else shard.part_of(tensor)
            memory.view(-1)[start : start + len(block)].copy_(block)

    def shared(self) -> list[tuple[str, str, torch.Tensor]]:
        """Return the tensors that are read from storage; see `Ranks.share_state`."""
        return [
            (one.name, "F32", self._tensor(one.parameter, array))
            for one in self.held
            for array in (
                *(one.arrays if one.scalars is not None else ()),
                *((MASTER,) if one.parameter in self.masters else ()),
            )
        ]

    def _tensor(self, parameter: torch.Tensor, array: str) -> torch.Tensor:
        if array == MASTER:
            return self.masters[parameter]
        tensor: torch.Tensor = self.state[parameter][array]
        return tensor


def _empty(parameter: torch.Tensor) -> torch.Tensor:
    """Return memory for FP32 values of a parameter, sharded as the parameter is."""
    if is_dtensor(parameter):
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            contiguous = torch.contiguous_format
            return torch.empty_like(
                parameter, dtype=torch.float32, device="cpu", memory_format=contiguous
            )
    return torch.empty(tuple(parameter.shape), dtype=torch.float32, device="cpu")


def number_parameters(groups: Sequence[Mapping[str, Any]]) -> dict[torch.Tensor, int]:
    """Return torch's number of each parameter, counted from 0 in the order of the groups."""
    numbers: dict[torch.Tensor, int] = {}
    for group in groups:
        for parameter in group["params"]:
            numbers.setdefault(parameter, len(numbers))
    return numbers


MAX_STEPS = 10**18
"""Largest number of steps that is accepted. No training takes as many, and a count on the drive can
hold it."""


def unstepped_state(initial: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """Return the state of a parameter that was never stepped, as torch's constructor makes it."""
    return {
        name: _empty(parameter).to(value.dtype).fill_(value.item())
        if isinstance(value, torch.Tensor) and value.dim()
        else copy.deepcopy(value)
        for name, value in initial.items()
    }


def read_state_dict(
    state_dict: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    rule: UpdateRule,
    shards: Mapping[torch.Tensor, Shard | None] | None = None,
) -> tuple[list[dict[str, Any]], dict[torch.Tensor, ParameterState]]:
    """Check a torch state dict against an optimizer, and find the state of each parameter in it.

    Args:
        state_dict: State dict of the wrapped class, or a full one. Its tensors may be on any
            device, or memory-mapped.
        groups: Parameter groups of the optimizer that loads the dict.
        rule: Update rule of the optimizer; it tells which state the optimizer keeps.
        shards: This rank's part of each parameter, None for one of which it steps nothing. What is
            returned is then the state of these parts. None if this process steps everything.

    Returns:
        The groups with the dict's hyper-parameters, and the state of each parameter that has any.

    Raises:
        ValueError: The numbers of groups or parameters differ, in torch's own words.
        MismatchError: Names, shapes, dtypes or the kind of state differ. The message names the
            parameter.
    """
    if not {"state", "param_groups"} <= state_dict.keys():
        raise MismatchError(
            f"load_state_dict() got a dict with the keys {sorted(map(str, state_dict))}, "
            "expected a state dict of an optimizer: of this class, or of torch with 'state' "
            "and 'param_groups'"
        )
    saved = rule.without_flags(state_dict["param_groups"], "load_state_dict()")
    check_groups(groups, saved)
    merged, states = [], {}
    masters = state_dict.get(MASTERS) or {}
    known = set()
    for index, (group, values) in enumerate(zip(groups, saved, strict=True)):
        _check_names(index, group, values)
        hyper = {k: v for k, v in values.items() if k not in ("params", "param_names")}
        own = {k: group[k] for k in ("params", "param_names") if k in group}
        options = {**rule.defaults, **rule.pristine(group), **hyper}
        merged.append({**options, **own})
        kept = rule.rule(merged[-1])
        template = scalar_template(rule, merged[-1], kept)
        for position, (parameter, number) in enumerate(
            zip(group["params"], values["params"], strict=True)
        ):
            known.add(number)
            at = f"state of parameter {number} (group {index}, position {position})"
            found = state_dict["state"].get(number, NO_ENTRY)
            if not isinstance(found, Mapping):
                raise MismatchError(f"load_state_dict(): {at} is a {type(found).__name__}")
            if parameter.requires_grad or found or number in masters:
                states[parameter] = read_parameter_state(
                    at,
                    found,
                    None if parameter.dtype == torch.float32 else masters.get(number),
                    tuple(parameter.shape),
                    kept,
                    template,
                    None if shards is None else partial(_part, parameter, shards.get(parameter)),
                )
    for number in (*state_dict["state"], *masters):
        if number not in known:
            raise MismatchError(
                f"load_state_dict(): it has state of parameter {number!r:.60}, but none of its "
                "param_groups has that parameter"
            )
    return merged, states


def read_parameter_state(
    at: str,
    found: Mapping[str, Any],
    master: Any,
    shape: tuple[int, ...],
    kept: Rule,
    template: Scalars,
    part: Part | None = None,
) -> ParameterState:
    """Return the checked entry of one parameter in a torch state dict as a `ParameterState`."""
    present = {name: value for name, value in found.items() if value is not None}
    expected = {*kept.arrays, *kept.scalars}
    if not present and found is not NO_ENTRY and expected:
        raise MismatchError(
            f"load_state_dict(): {at} is an empty dict, expected {sorted(expected)}. "
            "torch.distributed.checkpoint makes such dicts of flattened ones "
            "(flatten_optimizer_state_dict=True), since it looks for the names in optimizer.state: "
            "call set_optimizer_state_dict() within optimizer.materialized(), or do not flatten"
        )
    if present and present.keys() != expected:
        raise MismatchError(
            f"load_state_dict(): {at} has {sorted(present)}, and this optimizer keeps "
            f"{sorted(expected)}: it was made by another class, or with other flags (momentum, "
            "amsgrad, ...)"
        )
    out = ParameterState()
    if master is not None:
        out.master = _source(f"the master of {at}", master, shape, part)
    if present or (not expected and out.master is not None):
        kinds = {name: _kind(present[name], kind) for name, kind, _ in template}
        out.scalars = tuple(
            (name, kind, _number(f"{name!r} of the {at}", present[name], kind))
            for name, kind in kinds.items()
        )
        _check_steps(at, out.scalars)
        out.arrays = {
            n: _source(f"{n!r} of the {at}", present[n], shape, part) for n in kept.arrays
        }
    return out


def _check_steps(at: str, scalars: Scalars) -> None:
    """Refuse an impossible number of steps as ``step``, since checkpoints are named by it."""
    for name, _, value in scalars:
        if name == "step" and (not 0 <= value <= MAX_STEPS or value != int(value)):
            raise MismatchError(
                f"load_state_dict(): {name!r} of the {at} is {value!r:.60}, expected a number of "
                f"steps from 0 to {MAX_STEPS}"
            )


def scalar_template(rule: UpdateRule, group: Mapping[str, Any], kept: Rule) -> Scalars:
    """Return the scalar state of a parameter after one step, as a template of names and kinds."""
    options = rule.pristine(group)
    tiny = torch.zeros(1, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        state = rule.stepper().create(tiny, torch.zeros_like(tiny), options)
    return read_scalars(state, kept)


def stated_steps(state_dict: Mapping[str, Any]) -> int | None:
    """Return the number of optimizer steps stated in a state dict; None if it states none.

    Raises:
        MismatchError: The value is not a number of steps.
    """
    steps = state_dict.get(NUM_STEPS)
    if steps is None:
        return None
    if type(steps) is not int or not 0 <= steps <= MAX_COUNT:
        raise MismatchError(
            f"a state dict whose {NUM_STEPS!r} is {steps!r:.60}, expected a whole number from 0 to "
            f"{MAX_COUNT}: it counts optimizer steps. Remove it from the dict to have the largest "
            "'step' of a parameter taken instead"
        )
    return steps


def num_steps(scalars: Sequence[Scalars | None]) -> int | None:
    """Return the largest ``step`` of a parameter; None if no parameter has one."""
    steps = [int(v) for s in scalars if s is not None for name, _, v in s if name == "step"]
    return max(steps, default=None)


def _check_names(index: int, group: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Refuse a group whose parameters have other names, if both sides have names."""
    mine, theirs = group.get("param_names"), saved.get("param_names")
    if mine is None or theirs is None:
        return
    for position, (own, other) in enumerate(zip(mine, theirs, strict=False)):
        if own != other:
            raise MismatchError(
                f"load_state_dict(): parameter {position} of group {index} is {other!r} in the "
                f"dict and {own!r} here. State is assigned by position, as in torch: construct "
                "the optimizer with the parameters in the same order, or remove param_names from "
                "the dict's groups if only the names have changed"
            )


def _source(what: str, value: Any, shape: tuple[int, ...], part: Part | None) -> TensorSource:
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or (part is None and is_dtensor(value)):
            raise MismatchError(
                f"load_state_dict(): {what} is a {value.layout} {type(value).__name__}, expected "
                "a dense tensor: gather shards first"
            )
        _require_form(what, value, shape)
        return HeldTensor(value if part is None else part(what, value))
    if not hasattr(value, "read"):
        raise MismatchError(
            f"load_state_dict(): {what} is a {type(value).__name__}, expected a tensor"
        )
    _require_form(what, value, shape)
    source: TensorSource = value
    return source


def _require_form(what: str, value: Any, shape: tuple[int, ...]) -> None:
    """Refuse a tensor or source of another shape, or of a dtype that no state has."""
    if tuple(value.shape) != shape or value.dtype not in _STATE_DTYPES:
        raise MismatchError(
            f"load_state_dict(): {what} is {value.dtype} of shape {list(value.shape)}, expected "
            f"float32 of shape {list(shape)}"
        )


def _part(
    parameter: torch.Tensor, shard: Shard | None, what: str, value: torch.Tensor
) -> torch.Tensor:
    """Return this rank's part of a tensor of state: of a whole one, or of one that is sharded."""
    if is_dtensor(value):
        wanted = _placed(parameter) if is_dtensor(parameter) else None
        if wanted != _placed(value):
            raise MismatchError(
                f"load_state_dict(): {what} is a DTensor with the placements "
                f"{list(value.placements)}, and the parameter "  # type: ignore[attr-defined]
                + ("is a plain tensor" if wanted is None else f"has {list(wanted[1])}")
                + ", or they are on different meshes. Redistribute it to the mesh and placements "
                "of the parameter, or pass whole tensors (full_tensor())"
            )
        return value if shard is None else shard.part_of(value)
    return value if shard is None or shard.cut is None else value.detach()[shard.cut.box.slices]


def _placed(tensor: Any) -> tuple[Any, tuple[Any, ...]]:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.device_mesh, tuple(tensor.placements)


def _kind(value: Any, default: str) -> str:
    # torch makes these tensors FP32 or FP64 by the default dtype, which may have differed.
    dtype = getattr(value, "dtype", None)
    return kind_of_tensor(dtype, default) if isinstance(dtype, torch.dtype) else default


def _number(what: str, value: Any, kind: str) -> float | int:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    elif hasattr(value, "read") and math.prod(value.shape) == 1:
        value = value.read(0, 1).item()
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise MismatchError(f"load_state_dict(): {what} is {value!r:.60}, expected one number")
    if kind == "int" and not float(value).is_integer():
        raise MismatchError(f"load_state_dict(): {what} is {value!r:.60}, expected a whole number")
    return int(value) if kind == "int" else float(value)


def load_groups(
    groups: Sequence[dict[str, Any]], saved: Sequence[Mapping[str, Any]], rule: UpdateRule
) -> None:
    """Copy hyper-parameters from saved groups, which have been checked, to live groups."""
    rule.rewind(groups)
    for group, values in zip(groups, saved, strict=True):
        group.update(
            {k: copy.deepcopy(v) for k, v in values.items() if k not in NOT_HYPERPARAMETERS}
        )


def check_groups(groups: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]) -> None:
    """Compare the number of groups, and the number of parameters in each.

    Raises:
        ValueError: The numbers differ. The error and its words are those of torch.
    """
    if len(groups) != len(saved):
        raise ValueError("loaded state dict has a different number of parameter groups")
    for index, (group, other) in enumerate(zip(groups, saved, strict=True)):
        if len(group["params"]) != len(other["params"]):
            raise ValueError(
                "loaded state dict contains a parameter group that doesn't match the size of "
                f"optimizer's group (group {index}: {len(other['params'])} and "
                f"{len(group['params'])} parameters)"
            )
