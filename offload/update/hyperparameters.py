"""Checks of a checkpoint's hyper-parameters and scalar state against the optimizer class.

An undamaged manifest may still have values that make no sense to the optimizer, and only the class
can tell. Examples are a learning rate that is a string or NaN, or a missing step count. Without
these checks, such a value would fail in the middle of a step, or silently ruin the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from offload.errors import CheckpointError, UnsupportedOptimizerError
from offload.format._manifest_fields import TENSOR_KINDS
from offload.format.manifest import Manifest
from offload.format.strict_json import short
from offload.update.kept_state import Rule
from offload.update.rules import UpdateRule

_REMEDY = (
    "Return to an older checkpoint: restore(<step>, discard_newer=True), which withdraws all newer "
    "ones."
)


def check_hyperparameters(manifest: Manifest, defaults: Mapping[str, Any], path: str) -> None:
    """Check that every hyper-parameter of the class has a type that its default could have.

    Keys that the class does not have belong to a scheduler or the user, and may be anything.
    """
    if problem := misfit(manifest.groups, defaults):
        raise CheckpointError(f"{path}: {problem}. {_REMEDY}")


def misfit(groups: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]) -> str:
    """Return a message about the first value that the class cannot take; empty if none."""
    for index, group in enumerate(groups):
        for key in group.keys() & defaults.keys():
            if not _fits(group[key], defaults[key]):
                return (
                    f"param_groups[{index}][{key!r}] is {short(group[key])}, expected "
                    f"{_expected(defaults[key])}"
                )
    return ""


def rules_of(rule: UpdateRule, groups: Sequence[Mapping[str, Any]], path: str) -> list[Rule]:
    """Return the rule of each parameter group, with a checkpoint's hyper-parameters."""
    try:
        return [rule.rule(group) for group in groups]
    except UnsupportedOptimizerError as error:
        raise CheckpointError(
            f"{path}: its hyper-parameters cannot be used: {error} {_REMEDY}"
        ) from error


def check_scalars(manifest: Manifest, rules: Sequence[Rule], path: str) -> None:
    """Check that every parameter with state has the scalars that its group's rule keeps.

    Args:
        manifest: Manifest of the checkpoint.
        rules: Rule of each parameter group.
        path: Path of the checkpoint.

    Raises:
        CheckpointError: A parameter has other scalars, or its step count is negative or not
            finite; names the parameter.
    """
    for spec, scalars in zip(manifest.layout.parameters, manifest.scalars, strict=True):
        if scalars is None:
            continue
        rule = rules[spec.group]
        found = {name: kind in TENSOR_KINDS for name, kind, _ in scalars}
        expected = {name: kind in TENSOR_KINDS for name, kind in rule.scalars.items()}
        if found != expected or len(scalars) != len(expected):
            raise CheckpointError(
                f"{path}: the scalar state of {spec.name!r} is {short(scalars)}, expected "
                f"{list(rule.scalars)} of the kinds {list(rule.scalars.values())}. {_REMEDY}"
            )
        for name, _, value in scalars:
            if name == "step" and not 0 <= value < math.inf:
                raise CheckpointError(
                    f"{path}: the step count of {spec.name!r} is {value}, expected a number from "
                    f"0. {_REMEDY}"
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
    return not math.isnan(float(value))  # also works for a one-element tensor


def _expected(default: Any) -> str:
    if isinstance(default, bool):
        return "True or False"
    if isinstance(default, list | tuple):
        return f"{len(default)} numbers"
    return {str: "a string", type(None): "None or a single value"}.get(type(default), "a number")
