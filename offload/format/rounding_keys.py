"""The keys of stochastic rounding: with its index, a key gives each element its random number.

There are two rules for what that means, and
a store keeps the one that it was made with; see `Layout.counts_from`.

- "parameter": the key follows from the seed, the array, the step and the parameter's name, and the
  index is counted from the parameter's first element. So nothing else matters: neither chunks, nor
  which other parameters there are.
- "chunk": the key follows from the seed, the array and the step, and the index is that in element
  space.

One key serves 2**33 elements: from then on, another one is made of the number of the *window*.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol, TypeAlias

import numpy as np

WINDOW_BITS = 33
"""One key serves 2**33 elements."""

Key: TypeAlias = tuple[int, int]
"""Two numbers of 32 bits, without a sign."""

KeyOf: TypeAlias = Callable[[int], Key]
"""Gives the key of a window."""

_MASK_64 = (1 << 64) - 1

_GOLDEN_RATIO_64 = 0x9E3779B97F4A7C15

_MULTIPLIERS_64 = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)

_CACHED_NAMES = 1 << 16


class Run(Protocol):
    """Neighbouring values of one parameter; `offload.format.layout.Piece` is one."""

    @property
    def parameter(self) -> int:
        """Its index among the names of the keys."""
        ...

    @property
    def start(self) -> int:
        """First element, counted from the parameter's first element; 64 bits."""
        ...

    @property
    def stop(self) -> int:
        """One past the last element, counted from there, too."""
        ...


def stream_of(array: str) -> int:
    """Return the number that tells a state array from others of the same seed."""
    return zlib.crc32(array.encode())


def element_space_key(seed: int, stream: int, step: int, window: int) -> Key:
    """Return a key of elements that are counted in element space."""
    digest = _digest_64(f"{seed},{stream},{step},{window}".encode())
    return digest & 0xFFFFFFFF, digest >> 32


def parameter_key(seed: int, stream: int, step: int, name: str, window: int) -> Key:
    """Return a key of elements that are counted from their parameter's first one."""
    start = step_number(seed, stream, step) + name_number(name)
    return _mixed_key(start + window * _GOLDEN_RATIO_64)


def step_number(seed: int, stream: int, step: int) -> int:
    """Return the 64 bits that an array's keys in one step have in common."""
    return _digest_64(f"{seed},{stream},{step}".encode())


@lru_cache(_CACHED_NAMES)
def name_number(name: str) -> int:
    """Return the 64 bits that a parameter's keys have in common."""
    return _digest_64(name.encode("utf-8", "surrogatepass"))


class ParameterKeys:
    """Keys of all parameters, for one array in one step: those of `parameter_key`.

    Args:
        names: `name_numbers` of the parameters.
        seed: Of the rounding; any integer.
        array: Name of the state array.
        step: Number of the step.
    """

    def __init__(self, names: np.ndarray[Any, Any], seed: int, array: str, step: int) -> None:
        self._start = np.uint64(step_number(seed, stream_of(array), step))
        self._names = names

    def of(self, parameter: int) -> KeyOf:
        """Return what gives the keys of a parameter, by its index."""
        start = int(self._start) + int(self._names[parameter])
        return lambda window: _mixed_key(start + window * _GOLDEN_RATIO_64)

    def of_runs(self, runs: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the key of each `Run`, at its start: uint64, of an array of shape (n, 3)."""
        windows = (runs[:, 1] >> WINDOW_BITS).astype(np.uint64)
        start = self._names[runs[:, 0]] + self._start
        return _mixed(start + windows * np.uint64(_GOLDEN_RATIO_64))


def name_numbers(names: Sequence[str]) -> np.ndarray[Any, Any]:
    """Return `name_number` of each name, as uint64."""
    return np.array([name_number(name) for name in names], dtype=np.uint64)


def _digest_64(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _mixed_key(number: int) -> Key:
    """Return the halves of `_mixed` of one number; a fifth of the time of doing it with numpy."""
    z = number & _MASK_64
    for shift, multiplier in zip((30, 27), _MULTIPLIERS_64, strict=True):
        z = ((z ^ z >> shift) * multiplier) & _MASK_64
    z ^= z >> 31
    return z & 0xFFFFFFFF, z >> 32


def _mixed(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Mix 64-bit numbers, so that any two are as if they had nothing to do with each other.

    This is the finalizer of SplitMix64 (Steele, Lea and Flood, 2014).
    """
    first, second = (np.uint64(m) for m in _MULTIPLIERS_64)
    z = (numbers ^ (numbers >> np.uint64(30))) * first
    z = (z ^ (z >> np.uint64(27))) * second
    return np.asarray(z ^ (z >> np.uint64(31)))
