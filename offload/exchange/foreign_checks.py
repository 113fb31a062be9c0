"""Checks of other programs' state dicts, made before anything else uses their content."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from offload.errors import CheckpointError
from offload.exchange.torch_dicts import MAX_STEPS
from offload.format._manifest_fields import TENSOR_DTYPES, encode_group
from offload.format.strict_json import is_text, short
from offload.update.dtypes import DTYPE_CODES
from offload.update.hyperparameters import misfit


def check_optimizer(path: str, optimizer: Mapping[str, Any], masters: Any) -> None:
    """Check that an optimizer's state dict has torch's structure."""
    groups, state = optimizer["param_groups"], optimizer["state"]
    if not isinstance(groups, list | tuple) or not groups:
        raise CheckpointError(f"{path}: 'param_groups' is {short(groups)}, expected a list of some")
    for index, group in enumerate(groups):
        at = f"{path}: param_groups[{index}]"
        if not isinstance(group, Mapping) or not all(is_text(key) for key in group):
            raise CheckpointError(f"{at} is {short(group)}, expected a dict with names for keys")
        params, names = group.get("params"), group.get("param_names", [])
        if not isinstance(params, list | tuple) or not all(map(_is_key, params)):
            raise CheckpointError(
                f"{at}['params'] is {short(params)}, expected a list of numbers or names"
            )
        if not isinstance(names, list | tuple) or not all(map(is_text, names)):
            raise CheckpointError(
                f"{at}['param_names'] is {short(names)}, expected a list of names"
            )
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{path}: 'state' is {short(state)}, expected a dict")
    for key, value in state.items():
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise CheckpointError(
                f"{path}: the state of {short(key)} is a {type(value).__name__}, expected a dict "
                "with names for keys"
            )
    if not isinstance(masters, Mapping) or not all(hasattr(m, "read") for m in masters.values()):
        raise CheckpointError(f"{path}: its masters are {short(masters)}, expected tensors")


def check_model(path: str, model: Mapping[str, Any]) -> None:
    """Check that a store's checkpoint can hold the tensors of another program's model.

    Args:
        path: Path of the file, for messages.
        model: Tensors of the model, by name.

    Raises:
        CheckpointError: A checkpoint cannot hold the dtype of a tensor; the message names it.
    """
    for name, source in model.items():
        if source.dtype not in DTYPE_CODES:
            raise CheckpointError(
                f"{path}: {name!r:.80} is {source.dtype}, which a checkpoint cannot hold"
            )


def hyperparameters(
    path: str, index: int, group: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the hyper-parameters of a group, completed by the defaults of the class.

    Args:
        path: Path of the file, for messages.
        index: Index of the group.
        group: Parameter group of the state dict; checked by `check_optimizer`.
        defaults: Default hyper-parameters of the optimizer class.

    Raises:
        CheckpointError: A hyper-parameter has a type that the class does not take, is a tensor but
            not a single real number, or cannot be stored. The message names it.
    """
    found = {
        key: _value(f"{path}: param_groups[{index}][{key!r:.80}]", value)
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


def checked_step_count(value: Any, where: str) -> int:
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


def _is_key(value: Any) -> bool:
    return is_text(value) or (type(value) is int and 0 <= value < 1 << 63)


def _value(where: str, value: Any) -> Any:
    """Return a hyper-parameter. If it is a tensor in a file, read it."""
    if not hasattr(value, "read"):
        return value
    name = str(value.dtype).removeprefix("torch.")
    if math.prod(value.shape) != 1 or name not in TENSOR_DTYPES:
        raise CheckpointError(
            f"{where} is a tensor of {name} and shape {list(value.shape)}, expected one real number"
        )
    return value.read(0, 1).reshape(value.shape)
