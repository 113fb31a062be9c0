"""Encodings of state on storage: the state arrays of a parameter, and the form of their values.

The exact format keeps every state array as FP32, under torch's own name. Two opt-in formats are
smaller. ``master="split"`` leaves the upper half of a bf16 parameter's master in the live parameter
and stores the lower 16 bits. A `state_dtype` stores everything else in fewer bits. This module has
names and sizes only; the arithmetic is in `offload.update.coding`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from offload.errors import UnsupportedOptimizerError
from offload.format.header import DTYPE_BYTES

MASTER = "master"
"""Name of the state array that holds FP32 copies of 16-bit parameters."""

MASTER_LOW = "master_low"
"""Name of the state array that holds the lower 16 bits of masters whose upper half is the
parameter."""

BLOCK_ELEMENTS = 32
"""Number of elements that share one scale in 8-bit state, as in FlashOptim."""

SIGNED_MOMENTS = frozenset({"exp_avg", "momentum_buffer"})
"""State arrays of signed values for which 8 bits are known to be enough."""

UNSIGNED_MOMENTS = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg"})
"""State arrays of values that are never negative, for which 8 bits are known to be enough."""

_SCALE = "_scale"
_ARRAY_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_TAKEN_NAMES = ("model", "train_state", "manifest")

MasterFormat = Literal["float32", "split"]
StateDtype = Literal["float32", "bfloat16", "int8"]


@dataclass(frozen=True, slots=True)
class ArrayFormat:
    """Form of one stored value of a state array."""

    dtype: str
    """safetensors code of the value's dtype."""

    block: int = 1
    """Number of elements that the value stands for. Blocks start anew at each parameter."""

    @property
    def nbytes(self) -> int:
        """Size of one stored value in bytes."""
        return DTYPE_BYTES[self.dtype]


_F32 = ArrayFormat("F32")


@dataclass(frozen=True, slots=True)
class StateFormat:
    """Encoding of a store's state; the default is exact."""

    master: MasterFormat = "float32"
    """Form of masters: FP32 copies, or the lower 16 bits only ("split")."""
    state_dtype: StateDtype = "float32"
    """Form of all state other than masters."""

    def stored_arrays(self, dtype: str, kept: Sequence[str]) -> tuple[str, ...]:
        """Return the names of the arrays that a parameter has on storage.

        Args:
            dtype: safetensors code of the live parameter.
            kept: Names of the state arrays that the optimizer keeps for the parameter.

        Raises:
            UnsupportedOptimizerError: 8 bits are not known to be enough for one of the arrays.
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
                        "state_dtype='int8' supports the moments of Adam and its variants and the "
                        f"momentum of SGD, but this optimizer keeps {name!r}: use 'bfloat16' or "
                        "'float32'"
                    )
                names.append(scale_name(name))
        return tuple(names)


def array_format(name: str, state_dtype: str) -> ArrayFormat:
    """Return the form of an array's values, given its name and the layout's `state_dtype`."""
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
    """Return whether a state array may have this name, which is also the name of its file."""
    return (
        isinstance(name, str)
        and _ARRAY_NAME.fullmatch(name) is not None
        and name not in _TAKEN_NAMES
    )


def scale_name(array: str) -> str:
    """Return the name of the array that holds the scales of an 8-bit array."""
    return array + _SCALE
