"""How state is encoded on storage: which files a parameter has, and what one value of each is.

The exact format keeps every state array as FP32, under torch's own name. Two opt-in ones are
smaller: ``master="split"`` leaves the upper half of a bf16 parameter's master in the live
parameter and stores the lower 16 bits; a `state_dtype` stores everything else in fewer bits.
Names and sizes only; the arithmetic is in `codecs`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from offload.errors import UnsupportedOptimizerError
from offload.format.header import DTYPE_BYTES

MASTER = "master"
"""The state array that holds FP32 copies of 16-bit parameters."""

MASTER_LOW = "master_low"
"""The state array that holds the lower 16 bits of masters whose upper half is the parameter."""

BLOCK_ELEMENTS = 32
"""Elements that share one scale where state is kept in 8 bits, as in FlashOptim."""

SIGNED_MOMENTS = frozenset({"exp_avg", "momentum_buffer"})
"""State arrays that 8 bits are known to serve, with a sign."""

UNSIGNED_MOMENTS = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg"})
"""Likewise, never negative."""

_SCALE = "_scale"
_ARRAY_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_TAKEN_NAMES = ("model", "train_state", "manifest")

MasterFormat = Literal["float32", "split"]
StateDtype = Literal["float32", "bfloat16", "int8"]

CountsFrom = Literal["parameter", "chunk"]
"""Where blocks of 8-bit state, and the random numbers of stochastic rounding, are counted from."""

NEW_STORES_COUNT_FROM: CountsFrom = "parameter"
"""In stores of version 2 of the format it was "chunk"; see `Layout.counts_from`."""


@dataclass(frozen=True, slots=True)
class ArrayFormat:
    """What one stored value of a state array is."""

    dtype: str
    """Its safetensors code."""

    block: int = 1
    """Elements that it stands for. Blocks start anew at each parameter."""

    @property
    def nbytes(self) -> int:
        """Bytes of one stored value."""
        return DTYPE_BYTES[self.dtype]


_F32 = ArrayFormat("F32")


@dataclass(frozen=True, slots=True)
class StateFormat:
    """How a store encodes its state; the default is exact."""

    master: MasterFormat = "float32"
    state_dtype: StateDtype = "float32"

    def stored_arrays(self, dtype: str, kept: Sequence[str]) -> tuple[str, ...]:
        """Return the arrays on storage of a parameter.

        Args:
            dtype: safetensors code of the live parameter.
            kept: The state arrays that the optimizer keeps for it.

        Raises:
            UnsupportedOptimizerError: 8 bits are not known to be enough for one of them.
        """
        names: list[str] = []
        if dtype != "F32":
            split = self.master == "split" and dtype == "BF16"
            names.append(MASTER_LOW if split else MASTER)
        for name in kept:
            names.append(name)
            if self.state_dtype == "int8":
                if name not in SIGNED_MOMENTS | UNSIGNED_MOMENTS:
                    raise UnsupportedOptimizerError(
                        f"state_dtype='int8' is for the moments of Adam and its kin and for "
                        f"SGD's momentum, and this optimizer keeps {name!r}: use 'bfloat16' or "
                        "'float32'"
                    )
                names.append(scale_name(name))
        return tuple(names)


def array_format(name: str, state_dtype: str) -> ArrayFormat:
    """Return how an array is stored, given its name and the layout's `state_dtype`."""
    if name == MASTER:
        return _F32
    if name == MASTER_LOW:
        return ArrayFormat("I16")
    if state_dtype == "float32":
        return _F32
    if state_dtype == "bfloat16":
        return ArrayFormat("BF16")
    if name.endswith(_SCALE):
        return ArrayFormat("BF16", BLOCK_ELEMENTS)
    return ArrayFormat("I8" if name in SIGNED_MOMENTS else "U8")


def is_array_name(name: object) -> bool:
    """Return whether a state array may be called so: an array's name is also its file's."""
    return (
        isinstance(name, str)
        and _ARRAY_NAME.fullmatch(name) is not None
        and name not in _TAKEN_NAMES
    )


def scale_name(array: str) -> str:
    """Return the name of the array that holds the scales of an 8-bit one."""
    return array + _SCALE
