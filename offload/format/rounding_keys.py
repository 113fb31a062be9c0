"""Keys of stochastic rounding: a key and an element's index determine its random number.

The key follows from the seed, the array, the step and the parameter's name. The index is counted
from the parameter's first element. So neither chunks nor other parameters matter. One key serves a
*window* of 2**33 elements; the number of the window also enters the key.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

WINDOW_BITS = 33
"""Binary logarithm of the window's length: one key serves 2**33 elements."""

Key: TypeAlias = tuple[int, int]
"""Key of a window: two unsigned 32-bit numbers."""

KeyOf: TypeAlias = Callable[[int], Key]
"""Function that returns the key of a window, given the window's number."""

_MASK_64 = (1 << 64) - 1

_GOLDEN_RATIO_64 = 0x9E3779B97F4A7C15

_MULTIPLIERS_64 = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)

_CACHED_NAMES = 1 << 16


@lru_cache(_CACHED_NAMES)
def _name_number(name: str) -> int:
    """Return the 64-bit number that all keys of a parameter have in common."""
    return _digest_64(name.encode("utf-8", "surrogatepass"))


class ParameterKeys:
    """Keys of all parameters for one array in one step.

    Args:
        names: Result of `name_numbers` for the parameters' names.
        seed: Seed of the rounding; any integer.
        array: Name of the state array.
        step: Number of the step.
    """

    def __init__(self, names: np.ndarray[Any, Any], seed: int, array: str, step: int) -> None:
        self._start = np.uint64(_digest_64(f"{seed},{zlib.crc32(array.encode())},{step}".encode()))
        self._names = names

    def of(self, parameter: int) -> KeyOf:
        """Return the function that gives the keys of a parameter, given the parameter's index."""
        start = int(self._start) + int(self._names[parameter])
        return lambda window: _mixed_key(start + window * _GOLDEN_RATIO_64)

    def of_runs(self, runs: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the key of each run of elements at its start, as uint64 of shape (n,).

        Args:
            runs: Parameter, start and stop of each run, as integers of shape (n, 3).
        """
        windows = (runs[:, 1] >> WINDOW_BITS).astype(np.uint64)
        start = self._names[runs[:, 0]] + self._start
        return _mixed(start + windows * np.uint64(_GOLDEN_RATIO_64))


def name_numbers(names: Sequence[str]) -> np.ndarray[Any, Any]:
    """Return the number that all keys of each parameter have in common, as uint64 of shape (n,)."""
    return np.array([_name_number(name) for name in names], dtype=np.uint64)


def _digest_64(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _mixed_key(number: int) -> Key:
    """Return the low and the high half of `_mixed(number)`, in a fifth of numpy's time."""
    z = number & _MASK_64
    for shift, multiplier in zip((30, 27), _MULTIPLIERS_64, strict=True):
        z = ((z ^ z >> shift) * multiplier) & _MASK_64
    z ^= z >> 31
    return z & 0xFFFFFFFF, z >> 32


def _mixed(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Mix 64-bit numbers, so that the results look unrelated even if the numbers are close.

    This is the finalizer of SplitMix64 (Steele, Lea and Flood, 2014).
    """
    first, second = (np.uint64(m) for m in _MULTIPLIERS_64)
    z = (numbers ^ (numbers >> np.uint64(30))) * first
    z = (z ^ (z >> np.uint64(27))) * second
    return np.asarray(z ^ (z >> np.uint64(31)))
