"""Stochastic rounding to bfloat16, and the random numbers that it takes.

The rounding is that of Zamirai et al., "Revisiting BFloat16 Training" (2020). The random number of
an element follows from a key and the element's index. There are two rules for what that means, and
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
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch

from offload.scratch import Scratch, constant

WINDOW_BITS = 33
"""One key serves 2**33 elements."""

LONG_ELEMENTS = 16 << 10
"""Runs of so many elements are rounded one by one, shorter ones together: of those, what the calls
of torch cost beside the work would be the greater part."""

_MOST_TOGETHER = 64 << 10
"""Elements that are rounded together, so that what is worked on stays in a cache."""

Key: TypeAlias = tuple[int, int]
"""Two numbers of 32 bits, without a sign."""

KeyOf: TypeAlias = Callable[[int], Key]
"""Gives the key of a window."""

_MASK_64 = (1 << 64) - 1
_GOLDEN_RATIO_64 = 0x9E3779B97F4A7C15
_MULTIPLIERS_64 = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_CACHED_NAMES = 1 << 16


def _wrapped(value: int) -> int:
    """Return the signed 32-bit number with the same low bits."""
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)


_SIXTEEN, _FIFTEEN = constant(16), constant(15)
_LOW_16, _LOW_17 = constant((1 << 16) - 1), constant((1 << 17) - 1)
_GOLDEN_RATIO_32 = 0x9E3779B9
_GOLDEN_RATIO = _wrapped(_GOLDEN_RATIO_32)
_FIRST_MULTIPLIER = 0x7FEB352D
_MULTIPLIER = constant(_wrapped(0x846CA68B))


class Run(Protocol):
    """Neighbouring values of one parameter; `offload.layout.Piece` is one."""

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


def round_stochastic(
    values: torch.Tensor,
    out: torch.Tensor,
    *,
    key: KeyOf,
    first_element: int,
    scratch: Scratch,
) -> None:
    """Round FP32 to bfloat16, up or down at random, so that the expected result is the value.

    What an element gets depends on the key and its own index only, never on how a tensor is cut
    into calls. Values that bfloat16 holds exactly do not change, nor do infinities; a NaN becomes
    the quiet NaN of its sign. Values beyond the largest finite bfloat16 (3.39e38) become that or
    infinite, as if it were the next number.

    Args:
        values: FP32, shape (n,); unchanged.
        out: bfloat16, shape (n,); overwritten.
        key: Of each window of elements.
        first_element: Index of ``values[0]``; 64 bits.
        scratch: To work in.
    """
    done = 0
    while done < values.numel():
        # One 32-bit hash serves two elements, and one key 2**32 hashes.
        element = first_element + done
        window, pair = divmod(element >> 1, 1 << 32)
        num = min(values.numel() - done, (((window + 1) << WINDOW_BITS) - element))
        num_pairs = ((element & 1) + num + 1) >> 1
        random = _hash(pair, num_pairs, key(window), scratch)
        halves = random.view(torch.uint16)[element & 1 :][:num]
        _add(values[done : done + num], halves, out[done : done + num], scratch)
        done += num


def round_runs(
    values: torch.Tensor,
    out: torch.Tensor,
    runs: Sequence[Run],
    *,
    keys: ParameterKeys,
    scratch: Scratch,
) -> None:
    """Round runs of values that lie end to end; each as `round_stochastic` does.

    Many short runs take as many operations as one.

    Args:
        values: FP32, shape (n,); unchanged.
        out: bfloat16, shape (n,); overwritten.
        runs: Of n elements together, none of them empty.
        keys: Of all parameters.
        scratch: To work in.
    """
    if len(runs) == 1:
        (run,) = runs
        key = keys.of(run.parameter)
        round_stochastic(values, out, key=key, first_element=run.start, scratch=scratch)
        return
    table = np.array([(run.parameter, run.start, run.stop) for run in runs], dtype=np.int64)
    ends = np.cumsum(table[:, 2] - table[:, 1])
    for first, last in _groups(table, ends):
        begin, end = int(ends[first - 1]) if first else 0, int(ends[last - 1])
        if last - first > 1:
            random = _hash_runs(table[first:last], keys, scratch)
            _add(values[begin:end], random, out[begin:end], scratch)
            continue
        parameter, start, _ = table[first].tolist()
        round_stochastic(
            values[begin:end],
            out[begin:end],
            key=keys.of(parameter),
            first_element=start,
            scratch=scratch,
        )


def _groups(table: np.ndarray[Any, Any], ends: np.ndarray[Any, Any]) -> Iterator[tuple[int, int]]:
    """Cut runs into groups that are rounded together; yields first run and one past the last.

    What has more than one run has only short ones, with one key each.
    """
    alone = table[:, 2] - table[:, 1] >= LONG_ELEMENTS
    alone |= table[:, 1] >> WINDOW_BITS != (table[:, 2] - 1) >> WINDOW_BITS
    edges = {
        0,
        len(table),
        *(np.flatnonzero(alone)).tolist(),
        *(np.flatnonzero(alone) + 1).tolist(),
    }
    for first, last in pairwise(sorted(edges)):
        while first < last:
            begin = ends[first - 1] if first else 0
            stop = int(np.searchsorted(ends[:last], begin + _MOST_TOGETHER, "right"))
            stop = max(stop, first + 1)
            yield first, stop
            first = stop


def without_odd_nans(values: torch.Tensor) -> torch.Tensor:
    """Return FP32 values in which a NaN is the quiet one of its sign: a copy only if needed."""
    if not has_nan(values):
        return values
    bits = values.view(torch.int32)
    quiet = (bits & -(1 << 31)) | 0x7FC00000
    return torch.where(values.isnan(), quiet, bits).view(torch.float32)


def has_nan(values: torch.Tensor) -> bool:
    """Return whether any of at least one value is NaN."""
    # The maximum is NaN if anything is: one pass, and nothing to write.
    return math.isnan(values.amax().item())


def _add(values: torch.Tensor, random: torch.Tensor, out: torch.Tensor, scratch: Scratch) -> None:
    """Add 16 random bits to each value, and keep its upper half."""
    bits = without_odd_nans(values).view(torch.int32)
    sums = scratch.view("a", torch.int32, tuple(bits.shape))
    sums.copy_(random)
    sums.add_(bits).bitwise_right_shift_(_SIXTEEN)
    out.view(torch.int16).copy_(sums)


def _hash(first: int, num: int, key: Key, scratch: Scratch) -> torch.Tensor:
    """Return 32 random bits for each of `num` indexes, as int32.

    This is lowbias32 (C. Wellons, hash-prospector) of a Weyl sequence: indexes times the golden
    ratio. Of plain indexes it gives numbers whose differences are far from uniform. Half of the key
    is added before, half inside, lest two keys give the same numbers in another order.
    """
    before, inside = key
    x = scratch.view("b", torch.int32, (num,))
    start = constant(_wrapped(first * _GOLDEN_RATIO + before))
    torch.add(start, scratch.counter(num), alpha=_GOLDEN_RATIO, out=x)
    return _finish(x, constant(_wrapped(inside)), scratch)


def _hash_runs(table: np.ndarray[Any, Any], keys: ParameterKeys, scratch: Scratch) -> torch.Tensor:
    """Return 16 random bits for each element of several runs; the numbers of `_hash`."""
    key = keys.of_runs(table)
    odd = table[:, 1] & 1
    lengths = table[:, 2] - table[:, 1]
    num_pairs = (odd + lengths + 1) >> 1
    pair_ends = np.cumsum(num_pairs)
    first_pairs = (table[:, 1] >> 1) - (pair_ends - num_pairs)  # less that of the counter
    before = key + first_pairs.astype(np.uint64) * np.uint64(_GOLDEN_RATIO_32)
    starts = _repeated(before.astype(np.uint32), num_pairs)
    insides = _repeated((key >> np.uint64(32)).astype(np.uint32), num_pairs)
    x = scratch.view("b", torch.int32, (len(starts),))
    torch.add(starts, scratch.counter(len(starts)), alpha=_GOLDEN_RATIO, out=x)
    halves = _finish(x, insides, scratch).view(torch.int16)
    num = int(lengths.sum())
    if odd.any() or (lengths[:-1] & 1).any():  # some halves are left out
        ends = np.cumsum(lengths)
        places = 2 * (pair_ends - num_pairs) + odd - (ends - lengths)
        index = _repeated(places.astype(np.uint32), lengths).add_(scratch.counter(num))
        halves = halves.index_select(0, index)
    return halves[:num].view(torch.uint16)


def _repeated(values: np.ndarray[Any, Any], counts: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return each 32-bit value as often as its count says, as int32."""
    return torch.from_numpy(np.repeat(values.view(np.int32), counts))


def _finish(x: torch.Tensor, inside: torch.Tensor, scratch: Scratch) -> torch.Tensor:
    shifted = scratch.view("a", torch.int32, tuple(x.shape))

    def xor_shift(bits: torch.Tensor, mask: torch.Tensor) -> None:
        # int32 shifts copy the sign; torch has no shifts of uint32
        torch.bitwise_right_shift(x, bits, out=shifted)
        x.bitwise_xor_(shifted.bitwise_and_(mask))

    xor_shift(_SIXTEEN, _LOW_16)
    torch.add(inside, x, alpha=_FIRST_MULTIPLIER, out=x)
    xor_shift(_FIFTEEN, _LOW_17)
    x.mul_(_MULTIPLIER)
    xor_shift(_SIXTEEN, _LOW_16)
    return x


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


def _digest_64(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
