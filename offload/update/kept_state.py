"""State that an optimizer class keeps for a parameter: a value for each element, or one number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from offload.errors import UnsupportedOptimizerError
from offload.format.arrays import MASTER, MASTER_LOW, is_array_name

ScalarValue = tuple[str, str, float | int]
"""Name, kind (``f32`` or ``f64`` for a 0-d tensor, ``float`` or ``int`` for a number) and value."""

Scalars = tuple[ScalarValue, ...]
"""Scalar state of one parameter, such as its ``step``; hashable, so that parameters with equal
state can be grouped."""

_TENSOR_KINDS = {torch.float32: "f32", torch.float64: "f64"}
_KIND_DTYPES = {kind: dtype for dtype, kind in _TENSOR_KINDS.items()}


@dataclass(frozen=True, slots=True)
class Rule:
    """State that the optimizer keeps with the hyper-parameters of one parameter group."""

    arrays: tuple[str, ...]
    """State arrays by torch's names, with one FP32 value per element; without masters."""

    scalars: Mapping[str, str]
    """Kinds of state with one value per parameter, as in `ScalarValue`, by name."""

    changes: frozenset[str] = frozenset()
    """Hyper-parameters that the class itself changes in its group, such as a count of steps."""

    reads: frozenset[str] = frozenset()
    """Attributes that the class looks for on parameters. Chunks have none of them."""


def read_scalars(state: Mapping[str, Any], rule: Rule) -> Scalars:
    """Return a parameter's scalar state, given the dictionary that torch's step left."""
    values: list[ScalarValue] = []
    for name in rule.scalars:
        value = state[name]
        plain = value.item() if isinstance(value, torch.Tensor) else value
        values.append((name, _kind(value), plain))
    return tuple(values)


def unknown_state(state: Mapping[str, Any], rule: Rule) -> str:
    """Return which state a step has left that is not stored, or is gone; empty if none."""
    for name, value in state.items():
        if value is not None and name not in rule.arrays and name not in rule.scalars:
            return f"it keeps new state {name!r}, for which chunks have no room"
    gone = [name for name in rule.scalars if state.get(name) is None]
    return f"its state {gone[0]!r} is gone" if gone else ""


def write_scalars(scalars: Scalars) -> dict[str, Any]:
    """Return scalar state as new objects, which torch's step may read and change."""
    return {
        name: torch.tensor(value, dtype=_KIND_DTYPES[kind], device="cpu")
        if kind in _KIND_DTYPES
        else value
        for name, kind, value in scalars
    }


def kind_of_tensor(dtype: torch.dtype, default: str) -> str:
    """Return the kind of a scalar tensor of this dtype; `default` if it is not a tensor's kind."""
    return _TENSOR_KINDS.get(dtype, default) if default in _KIND_DTYPES else default


def describe(name: str, shape: torch.Size, state: Mapping[str, Any]) -> Rule:
    """Return which state a class keeps, given the state that its step left for a parameter."""
    arrays: list[str] = []
    scalars: dict[str, str] = {}
    for key, value in state.items():
        if not isinstance(key, str):
            raise UnsupportedOptimizerError(
                f"{name} cannot be offloaded: it keeps state under the key {key!r}, and only text "
                "can name stored state"
            )
        is_tensor = isinstance(value, torch.Tensor)
        if is_tensor and value.shape == shape and value.dtype == torch.float32:
            arrays.append(key)
        elif (is_tensor and value.dim() == 0 and value.dtype in _TENSOR_KINDS) or (
            isinstance(value, int | float) and not isinstance(value, bool)
        ):
            scalars[key] = _kind(value)
        elif value is not None:
            kind = (
                f"{value.dtype} tensor of shape {tuple(value.shape)}" if is_tensor else type(value)
            )
            raise UnsupportedOptimizerError(
                f"{name} cannot be offloaded: it keeps {key!r} as a {kind} for a float32 parameter "
                f"of shape {tuple(shape)}. Only FP32 tensors of the parameter's own "
                "shape and single numbers can be streamed."
            )
    for array in arrays:
        if not is_array_name(array):
            raise UnsupportedOptimizerError(
                f"{name} cannot be offloaded: it keeps state called {array!r}, and a state array "
                "names a file: use at most 64 letters, digits and underscores, and neither 'model' "
                "nor 'train_state'"
            )
    for reserved in (MASTER, MASTER_LOW):
        if reserved in arrays:
            raise UnsupportedOptimizerError(
                f"{name} cannot be offloaded: it keeps state of its own called {reserved!r}, the "
                "name that this package gives to the FP32 copies of parameters."
            )
    return Rule(tuple(arrays), scalars)


def _kind(value: torch.Tensor | float) -> str:
    if isinstance(value, torch.Tensor):
        return _TENSOR_KINDS[value.dtype]
    return "int" if isinstance(value, int) else "float"
