"""What a checkpoint says of hyper-parameters and scalar state, held against what the class has.

A manifest that is whole says nothing about whether its values make sense to the optimizer: only the
class knows. A learning rate that is a string or not a number, or a step count that is missing,
would otherwise show in the middle of a step, or ruin the parameters in silence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from offload.errors import CheckpointError, UnsupportedOptimizerError
from offload.format.manifest import Manifest
from offload.format.strict_json import short
from offload.update.rules import Rule, UpdateRule

_ELSE = "Go back to an older checkpoint: restore(<step>, discard_newer=True)."
_TENSORS = ("f32", "f64")


def check_hyperparameters(manifest: Manifest, defaults: Mapping[str, Any], path: str) -> None:
    """Check that every hyper-parameter of the class has a type that its default could have.

    Keys that the class does not have are a scheduler's or the user's, and may be anything.

    Args:
        manifest: Of the checkpoint.
        defaults: Of the optimizer class.
        path: Of the checkpoint.

    Raises:
        CheckpointError: One has not, or is not a number; names group and key.
    """
    if problem := misfit(manifest.groups, defaults):
        raise CheckpointError(f"{path}: {problem}. {_ELSE}")


def misfit(groups: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]) -> str:
    """Return which hyper-parameter of which group is none that the class takes; empty if all are.

    Args:
        groups: Of parameters.
        defaults: Of the optimizer class.
    """
    for index, group in enumerate(groups):
        for key in group.keys() & defaults.keys():
            if not _fits(group[key], defaults[key]):
                return (
                    f"param_groups[{index}][{key!r}] is {short(group[key])}, expected "
                    f"{_expected(defaults[key])}"
                )
    return ""


def rules_of(rule: UpdateRule, groups: Sequence[Mapping[str, Any]], path: str) -> list[Rule]:
    """Return what the class keeps with a checkpoint's hyper-parameters.

    Raises:
        CheckpointError: It cannot take a step with them.
    """
    try:
        return [rule.rule(group) for group in groups]
    except UnsupportedOptimizerError as error:
        raise CheckpointError(
            f"{path}: its hyper-parameters cannot be used: {error} {_ELSE}"
        ) from error


def check_scalars(manifest: Manifest, rules: Sequence[Rule], path: str) -> None:
    """Check that every parameter that has state has the scalars that its group's rule keeps.

    Args:
        manifest: Of the checkpoint.
        rules: Of each parameter group.
        path: Of the checkpoint.

    Raises:
        CheckpointError: It has others, or a step count that is none; names the parameter.
    """
    for spec, scalars in zip(manifest.layout.parameters, manifest.scalars, strict=True):
        if scalars is None:
            continue
        rule = rules[spec.group]
        found = {name: kind in _TENSORS for name, kind, _ in scalars}
        expected = dict(zip(rule.scalars, (kind in _TENSORS for kind in rule.kinds), strict=True))
        if found != expected or len(scalars) != len(expected):
            raise CheckpointError(
                f"{path}: the scalar state of {spec.name!r} is {short(scalars)}, expected "
                f"{list(rule.scalars)} of the kinds {list(rule.kinds)}. {_ELSE}"
            )
        for name, _, value in scalars:
            if name == "step" and not 0 <= value < math.inf:
                raise CheckpointError(
                    f"{path}: the step count of {spec.name!r} is {value}, expected a number from "
                    f"0. {_ELSE}"
                )


def _fits(value: Any, default: Any) -> bool:
    if isinstance(default, bool):
        return isinstance(value, bool)
    if isinstance(default, list | tuple):
        return (
            isinstance(value, list | tuple)
            and len(value) == len(default)
            and all(map(_fits, value, default))
        )
    if isinstance(default, str):
        return isinstance(value, str)
    if default is None:
        return value is None or isinstance(value, bool | int | float | str)
    return _is_number(value)


def _is_number(value: Any) -> bool:
    if isinstance(value, bool | str | list | tuple | None):
        return False
    return not math.isnan(float(value))  # of a one-element tensor as well


def _expected(default: Any) -> str:
    if isinstance(default, bool):
        return "True or False"
    if isinstance(default, list | tuple):
        return f"{len(default)} numbers"
    return {str: "a string", type(None): "None or a single value"}.get(type(default), "a number")
