"""Rounding of FP32 to bfloat16: at random, or with the remainder kept (split masters).

The former is that of Zamirai et al., "Revisiting BFloat16 Training" (2020), with random numbers
from the keys of `offload.format.rounding_keys`; the latter is that of "FlashOptim: Optimizers for
Memory Efficient Training" (Databricks). The bytes depend neither on threads nor on where a tensor
is cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from offload.format.chunk_plan import Piece
from offload.format.rounding_keys import WINDOW_BITS, Key, KeyOf, ParameterKeys
from offload.update.scratch import Scratch, constant

LONG_ELEMENTS = 16 << 10
"""Minimal number of elements of runs that are rounded one by one. Shorter runs are rounded
together, because the overhead of the calls of torch would exceed the work."""

_MAX_GROUP_ELEMENTS = 64 << 10
"""Maximal number of elements that are rounded together, so that they stay in a cache."""


def _as_int32(value: int) -> int:
    """Return the signed 32-bit number with the same low bits."""
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)


_HALF, _SIXTEEN, _FIFTEEN = constant(0x8000), constant(16), constant(15)
_LOW_16, _LOW_17 = constant((1 << 16) - 1), constant((1 << 17) - 1)
_GOLDEN_RATIO_32 = 0x9E3779B9
_GOLDEN_RATIO = _as_int32(_GOLDEN_RATIO_32)
_FIRST_MULTIPLIER = 0x7FEB352D
_MULTIPLIER = constant(_as_int32(0x846CA68B))


def round_stochastic(
    values: torch.Tensor,
    out: torch.Tensor,
    *,
    key: KeyOf,
    first_element: int,
    scratch: Scratch,
) -> None:
    """Round FP32 to bfloat16, up or down at random, so that the expected result is the value.

    The result of an element depends only on the key and the element's index, never on how a tensor
    is cut into calls. Values that bfloat16 holds exactly do not change, nor do infinities. A NaN
    becomes the quiet NaN of its sign. A value beyond the largest finite bfloat16 (3.39e38) becomes
    that number or infinity, as if infinity were the next number.
    """
    done = 0
    while done < values.numel():
        # One 32-bit hash serves two elements, and one key serves 2**32 hashes.
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
    runs: Sequence[Piece],
    *,
    keys: ParameterKeys,
    scratch: Scratch,
) -> None:
    """Round runs that lie end to end as `round_stochastic` does, with few operations of torch."""
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
    """Cut runs into groups to be rounded together: one run, or short runs of one key each."""
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
            stop = int(np.searchsorted(ends[:last], begin + _MAX_GROUP_ELEMENTS, "right"))
            stop = max(stop, first + 1)
            yield first, stop
            first = stop


def with_quiet_nans(values: torch.Tensor) -> torch.Tensor:
    """Return FP32 values with each NaN replaced by the quiet NaN of its sign; a copy if needed."""
    if not has_nan(values):
        return values
    bits = values.view(torch.int32)
    quiet = (bits & -(1 << 31)) | 0x7FC00000
    return torch.where(values.isnan(), quiet, bits).view(torch.float32)


def has_nan(values: torch.Tensor) -> bool:
    """Return whether any value is NaN. There must be at least one value."""
    # The maximum is NaN if any value is. It takes one pass and writes nothing.
    return math.isnan(values.amax().item())


def _add(values: torch.Tensor, random: torch.Tensor, out: torch.Tensor, scratch: Scratch) -> None:
    """Add 16 random bits to each value, and keep the upper half of the sum."""
    bits = with_quiet_nans(values).view(torch.int32)
    sums = scratch.view("a", torch.int32, tuple(bits.shape))
    sums.copy_(random)
    sums.add_(bits).bitwise_right_shift_(_SIXTEEN)
    out.view(torch.int16).copy_(sums)


def _hash(first: int, num: int, key: Key, scratch: Scratch) -> torch.Tensor:
    """Return 32 random bits for each of `num` consecutive indexes, as int32.

    This is lowbias32 (C. Wellons, hash-prospector) of a Weyl sequence: indexes times the golden
    ratio. The hashes of plain indexes have differences that are far from uniform. Half of the key
    is added before the hash and half inside, so that two keys do not give the same numbers in
    another order.
    """
    before, inside = key
    x = scratch.view("b", torch.int32, (num,))
    start = constant(_as_int32(first * _GOLDEN_RATIO + before))
    torch.add(start, scratch.counter(num), alpha=_GOLDEN_RATIO, out=x)
    return _finish_hash(x, constant(_as_int32(inside)), scratch)


def _hash_runs(table: np.ndarray[Any, Any], keys: ParameterKeys, scratch: Scratch) -> torch.Tensor:
    """Return 16 random bits for each element of several runs: the numbers of `_hash`."""
    key = keys.of_runs(table)
    odd = table[:, 1] & 1
    lengths = table[:, 2] - table[:, 1]
    num_pairs = (odd + lengths + 1) >> 1
    pair_ends = np.cumsum(num_pairs)
    first_pairs = (table[:, 1] >> 1) - (pair_ends - num_pairs)  # minus the counter's own start
    before = key + first_pairs.astype(np.uint64) * np.uint64(_GOLDEN_RATIO_32)
    starts = _repeated(before.astype(np.uint32), num_pairs)
    insides = _repeated((key >> np.uint64(32)).astype(np.uint32), num_pairs)
    x = scratch.view("b", torch.int32, (len(starts),))
    torch.add(starts, scratch.counter(len(starts)), alpha=_GOLDEN_RATIO, out=x)
    halves = _finish_hash(x, insides, scratch).view(torch.int16)
    num = int(lengths.sum())
    if odd.any() or (lengths[:-1] & 1).any():  # some halves are left out
        ends = np.cumsum(lengths)
        places = 2 * (pair_ends - num_pairs) + odd - (ends - lengths)
        index = _repeated(places.astype(np.uint32), lengths).add_(scratch.counter(num))
        halves = halves.index_select(0, index)
    return halves[:num].view(torch.uint16)


def _repeated(values: np.ndarray[Any, Any], counts: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return each 32-bit value as many times as its count, as int32."""
    return torch.from_numpy(np.repeat(values.view(np.int32), counts))


def _finish_hash(x: torch.Tensor, inside: torch.Tensor, scratch: Scratch) -> torch.Tensor:
    shifted = scratch.view("a", torch.int32, tuple(x.shape))

    def xor_shift(bits: torch.Tensor, mask: torch.Tensor) -> None:
        """Compute ``x ^= x >> bits`` of unsigned numbers."""
        # int32 shifts copy the sign, so it is masked. torch has no shifts of uint32.
        torch.bitwise_right_shift(x, bits, out=shifted)
        x.bitwise_xor_(shifted.bitwise_and_(mask))

    xor_shift(_SIXTEEN, _LOW_16)
    torch.add(inside, x, alpha=_FIRST_MULTIPLIER, out=x)
    xor_shift(_FIFTEEN, _LOW_17)
    x.mul_(_MULTIPLIER)
    xor_shift(_SIXTEEN, _LOW_16)
    return x


def split_master(
    master: torch.Tensor, live: torch.Tensor, low: torch.Tensor, *, scratch: Scratch
) -> None:
    """Split FP32 masters into bfloat16 parameters and 16-bit remainders.

    The parameter is the master rounded to nearest, ties away from zero (plain torch rounds ties to
    even). Because of this rounding the remainder fits into a signed 16-bit number. `join_master`
    recovers every finite value, infinity and zero exactly, even a value so large that its parameter
    is infinite. A NaN becomes the quiet NaN of its sign, because other NaNs could round to a
    number.

    Args:
        master: FP32, shape (n,); unchanged.
        live: bfloat16, shape (n,); overwritten with the parameters.
        low: int16, shape (n,); overwritten with the remainders.
        scratch: Working memory.
    """
    if not master.numel():
        return
    bits = with_quiet_nans(master).view(torch.int32)
    rounded = scratch.view("a", torch.int32, bits.shape)
    torch.add(bits, _HALF, out=rounded)
    live.view(torch.int16).copy_(rounded.bitwise_right_shift_(_SIXTEEN))
    low.copy_(bits)


def join_master(
    live: torch.Tensor, low: torch.Tensor, out: torch.Tensor, *, scratch: Scratch
) -> None:
    """Join bfloat16 parameters and the remainders of `split_master` into FP32 masters.

    If a parameter has been edited since the split, its master rounds to the edited value and has
    the remainder bits of the old value: it is at most half a unit in the last place away. Two kinds
    of edits have no such master: zero with a negative remainder, and an infinity with a positive
    one. Then the master is the edited value itself. (A finite value that is edited to an infinity,
    with a negative remainder, becomes a finite master that rounds to the infinity. The largest
    finite masters are stored in this way.)
    """
    if not out.numel():
        return
    remainder = scratch.view("a", torch.int32, out.shape)
    remainder.copy_(low)  # extends the sign to 32 bits
    out.copy_(live)
    out.view(torch.int32).add_(remainder)
    if has_nan(out):
        out.copy_(torch.where(out.isnan(), live.float(), out))
