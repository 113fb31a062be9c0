"""Weights of another program that no optimizer has seen: which are imported, and in which dtype."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Final

import torch

from offload.errors import CheckpointError, MismatchError
from offload.exchange.hf_files import peft_names
from offload.exchange.stored_tensor import read_json
from offload.format.strict_json import short
from offload.model.outside import is_outside
from offload.update.coding.filler import TensorSource

_CONFIG: Final = "config.json"
_HEAD: Final = "lm_head.weight"
"""End of the name of the weight that ``tie_word_embeddings`` ties to the input embedding."""

_FLOATS: Final = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_TRAINED: Final = (torch.float32, torch.bfloat16, torch.float16)
_COMPARED_ELEMENTS: Final = 512 << 10


class CastTensor:
    """A tensor of another dtype than its source; implements `TensorSource`.

    Args:
        source: Tensor with the values.
        dtype: Dtype that they are rounded to, as torch does.
    """

    def __init__(self, source: TensorSource, dtype: torch.dtype) -> None:
        self._source = source
        self.shape = source.shape
        self.dtype = dtype

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return elements `start` to `stop` in row-major order, flat, in host memory."""
        return self._source.read(start, stop).to(self.dtype)


def chosen_weights(
    path: str,
    model: Mapping[str, TensorSource],
    skip: Sequence[str],
    dtype: torch.dtype | None,
) -> dict[str, TensorSource]:
    """Return the tensors to import, floating-point ones in a dtype.

    Raises:
        MismatchError: A pattern of `skip` fits no tensor, or all tensors are skipped.
        ValueError: No parameter can be trained in the dtype.
    """
    if dtype is not None and dtype not in _TRAINED:
        raise ValueError(f"dtype is {dtype}, expected one of {', '.join(map(str, _TRAINED))}")
    for pattern in skip:
        if not any(fnmatchcase(name, pattern) for name in model):
            raise MismatchError(f"{path}: has no tensor that {pattern!r:.80} of skip= fits")
    found = {
        name: CastTensor(source, dtype)
        if dtype is not None and source.dtype in _FLOATS and source.dtype != dtype
        else source
        for name, source in model.items()
        if not any(fnmatchcase(name, pattern) for pattern in skip)
    }
    if not found:
        raise MismatchError(f"{path}: skip= leaves no tensor")
    return found


class LiveTensor:
    """A tensor of a module; implements `TensorSource`."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return elements `start` to `stop` in row-major order, flat, in host memory."""
        return self._tensor.reshape(-1)[start:stop].cpu()


def named_as_in(
    path: str, module: torch.nn.Module, found: Mapping[str, TensorSource]
) -> dict[str, TensorSource]:
    """Return tensors of a file by the names in a module, and the module's own where it lacks them.

    The names of a model with an adapter of peft are those that the base model's files have.

    Raises:
        MismatchError: A tensor has no value anywhere, or NaN, or the module has no place for it.
    """
    names: dict[int, list[str]] = {}
    tensors = {id(t): t for t in module.state_dict(keep_vars=True).values()}
    for name, tensor in module.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    adapted = peft_names((first, others) for first, *others in names.values())
    base = {} if adapted is None else adapted.base
    left = dict(found)
    chosen: dict[str, TensorSource] = {}
    for key, tensor in tensors.items():
        own = [base.get(name, name) for name in names[key]]
        sources = [left.pop(name) for name in own if name in left]
        if not sources and isinstance(tensor, torch.nn.Parameter):
            if is_outside(tensor):
                raise MismatchError(
                    f"{path}: has no {own[0]!r}, and the model has no values for it"
                )
            if tensor.isnan().any():  # as DoRA makes of a base that has no values yet
                raise MismatchError(
                    f"{path}: has no {own[0]!r}, and the model's own is NaN: do not derive it from "
                    "parameters that have no values yet"
                )
        chosen[names[key][0]] = sources[0] if sources else LiveTensor(tensor)
    if left:
        raise MismatchError(
            f"{path}: has {next(iter(left))!r} and {len(left) - 1} more tensors that the model "
            "lacks: leave them out with skip=, or pass another model="
        )
    return chosen


def find_tied(directory: str, model: Mapping[str, TensorSource]) -> tuple[str, str] | None:
    """Return the name of an output embedding that is stored twice, and that of the input embedding.

    They are tied if ``config.json`` says so and the one other tensor of this shape equals it. If
    only one of them is stored, there is nothing to do: the live model says what is tied to it.

    Raises:
        CheckpointError: ``config.json`` cannot be read.
    """
    heads = [name for name in model if name == _HEAD or name.endswith("." + _HEAD)]
    if len(heads) != 1 or not _says_tied(os.path.join(directory, _CONFIG)):
        return None
    head = model[heads[0]]
    alike = [n for n, t in model.items() if (t.shape, t.dtype) == (head.shape, head.dtype)]
    others = [name for name in alike if name != heads[0]]
    if len(others) != 1 or not _is_equal(head, model[others[0]]):
        return None
    return heads[0], others[0]


def _says_tied(path: str) -> bool:
    """Return whether a model's config ties the word embeddings."""
    if not os.path.exists(path):
        return False
    config = read_json(path)
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: {short(config)}, expected an object")
    text = config.get("text_config")
    nested = text.get("tie_word_embeddings") if isinstance(text, dict) else None
    return config.get("tie_word_embeddings", nested) is True


def _is_equal(first: TensorSource, second: TensorSource) -> bool:
    """Return whether two tensors of one dtype and shape have the same bits."""
    num = math.prod(first.shape)
    return all(
        torch.equal(
            first.read(start, min(start + _COMPARED_ELEMENTS, num)).view(torch.uint8),
            second.read(start, min(start + _COMPARED_ELEMENTS, num)).view(torch.uint8),
        )
        for start in range(0, num, _COMPARED_ELEMENTS)
    )
