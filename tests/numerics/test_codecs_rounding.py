"""Split masters lose nothing, and stochastic rounding is the format's, and right on average.

A bf16 parameter and 16 bits make up the FP32 master again, for all bit patterns that tell. Random
bits are compared with the format's generator in Python's integers. The functions are called
themselves, since no optimizer can be given bit patterns of a choice.
"""

from __future__ import annotations

import hashlib
import itertools
import zlib
from functools import partial

import numpy as np
import pytest
import torch

from offload.format import rounding_keys
from offload.format.chunk_plan import Piece
from offload.update.coding.codecs import (
    Scratch,
    join_master,
    round_runs,
    round_stochastic,
    split_master,
)

SIGN, INFINITY, QUIET = 0x80000000, 0x7F800000, 0x7FC00000
ALL_16 = np.arange(1 << 16, dtype=np.uint64)
TELLING_LOWS = np.array(
    [0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0x8002, 0xC000, 0xFFFE, 0xFFFF, 0x1234],
    dtype=np.uint64,
)
TELLING_HIGHS = {
    "zero-and-denormals": [0x0000, 0x0001, 0x0002, 0x007F],
    "normal": [0x0080, 0x0081, 0x3F7F, 0x3F80, 0x3F81, 0x4049, 0x40FF],
    "largest-and-infinity": [0x7F7E, 0x7F7F, 0x7F80],
    "nan": [0x7F81, 0x7FBF, 0x7FC0, 0x7FC1, 0x7FFE, 0x7FFF],
}


def pattern(highs: np.ndarray, lows: np.ndarray) -> np.ndarray:
    """Return FP32 bits of all combinations of halves."""
    return ((highs[:, None] << 16) | lows[None, :]).ravel().astype(np.uint64)


def of_both_signs(highs: list[int]) -> np.ndarray:
    return np.array([high | sign for high in highs for sign in (0, 0x8000)], dtype=np.uint64)


PATTERNS = {
    "every-upper-half": pattern(ALL_16, TELLING_LOWS),
    **{f"lower-{k}": pattern(of_both_signs(v), ALL_16) for k, v in TELLING_HIGHS.items()},
}


def round_half_away(bits: np.ndarray) -> np.ndarray:
    """Return the bf16 bits of FP32 bits, to nearest and ties away from zero: the oracle."""
    sign, magnitude = bits & SIGN, bits & 0x7FFFFFFF
    rounded = (magnitude >> 16) + ((magnitude & 0xFFFF) >= 0x8000)
    return (sign >> 16) | np.where(magnitude > INFINITY, QUIET >> 16, rounded)


def quieted(bits: np.ndarray) -> np.ndarray:
    return np.where((bits & 0x7FFFFFFF) > INFINITY, (bits & SIGN) | QUIET, bits)


def floats(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.astype(np.uint32).view(np.int32)).view(torch.float32)


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    """Return unsigned bits."""
    if tensor.dtype.itemsize == 2:
        return tensor.view(torch.int16).numpy().view(np.uint16).astype(np.uint64)
    return tensor.view(torch.int32).numpy().view(np.uint32).astype(np.uint64)


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    live = torch.full((len(master),), 7.0, dtype=torch.bfloat16)
    low = torch.full((len(master),), 7, dtype=torch.int16)
    split_master(master, live, low, scratch=Scratch())
    return live, low


def join(live: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    out = torch.full((len(live),), 7.0)
    join_master(live, low, out, scratch=Scratch())
    return out


@pytest.mark.parametrize("bits", PATTERNS.values(), ids=PATTERNS)
def test_every_master_is_recovered_from_its_halves(bits, set_threads):
    for only_numbers in (False, True):  # which take another way if there is no NaN among them
        if only_numbers:
            bits = bits[(bits & 0x7FFFFFFF) <= INFINITY]
        master = floats(bits)
        live, low = split(master)
        assert np.array_equal(bits_of(master), bits), "the master is left as it was"
        assert np.array_equal(bits_of(live), round_half_away(bits))
        assert np.array_equal(bits_of(low), quieted(bits) & 0xFFFF)
        assert np.array_equal(bits_of(join(live, low)), quieted(bits))
        set_threads(2)


def test_split_masters_round_as_torch_does_but_for_ties():
    bits = PATTERNS["every-upper-half"]
    bits = bits[(bits & 0x7FFFFFFF) <= INFINITY]
    master = floats(bits)
    differs = split(master)[0].view(torch.int16) != master.bfloat16().view(torch.int16)
    ties = torch.from_numpy((bits & 0xFFFF) == 0x8000)
    assert differs.any()
    assert not (differs & ~ties).any()


TELLING = of_both_signs([high for highs in TELLING_HIGHS.values() for high in highs])
EDITED = {
    "every-parameter": np.meshgrid(ALL_16, TELLING_LOWS),
    "every-remainder": np.meshgrid(TELLING, ALL_16),
}


@pytest.mark.parametrize("halves", EDITED.values(), ids=EDITED)
def test_an_edited_parameter_is_what_the_new_master_rounds_to(halves):
    """Of halves that no split makes together: the parameter was changed in between."""
    live_bits, low_bits = (h.ravel().astype(np.uint16).view(np.int16) for h in halves)
    live = torch.from_numpy(live_bits).view(torch.bfloat16)
    master = join(live, torch.from_numpy(low_bits))
    nan = live.isnan().numpy()
    assert np.array_equal(master.isnan().numpy(), nan)
    assert np.array_equal(round_half_away(bits_of(master))[~nan], bits_of(live)[~nan])
    zeros = live == 0
    assert master[zeros].abs().max() < 1e-40
    assert torch.equal(master[zeros].signbit(), live[zeros].signbit())


@pytest.mark.parametrize("num", [0, 1, 31, 33, 1000])
@pytest.mark.parametrize("offset", [0, 3])
def test_any_length_at_any_offset_with_scratch_that_was_used_before(num, offset):
    master = torch.randn(2000, generator=torch.Generator().manual_seed(num))
    live, low = torch.zeros(2000).bfloat16(), torch.zeros(2000, dtype=torch.int16)
    out, scratch = torch.zeros(2000), Scratch()
    cut = slice(offset, offset + num)
    for other in (slice(0, 1000), cut, slice(7, 12), cut):
        parts = (live[other].clone(), low[other].clone()) if other != cut else (live[cut], low[cut])
        split_master(master[other], *parts, scratch=scratch)
        join_master(live[cut], low[cut], out[cut], scratch=scratch)
    assert torch.equal(out[cut], master[cut])
    for untouched in (live, low, out):
        assert not untouched[:offset].any()
        assert not untouched[offset + num :].any()


NUM = 1 << 18
ARRAY = "exp_avg"
STREAM = zlib.crc32(ARRAY.encode())
MASK = np.uint64(0xFFFFFFFF)
FIVE_SIGMA = 5.0

Name = str | None
"""Of the parameter that elements are counted in; None where they are counted in element space."""


def mixed(z: int) -> int:
    """Return the finalizer of SplitMix64, in Python's integers."""
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) % 2**64
    return z ^ z >> 31


def blake(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def key_of(seed: int, stream: int, step: int, name: Name, window: int) -> tuple[int, int]:
    """Return the two halves of a key: the oracle."""
    if name is None:
        key = blake(f"{seed},{stream},{step},{window}")
    else:
        start = blake(f"{seed},{stream},{step}") + blake(name) + window * 0x9E3779B97F4A7C15
        key = mixed(start % 2**64)
    return key % 2**32, key >> 32


def random_16(
    seed: int, stream: int, step: int, first: int, num: int, name: Name = None
) -> np.ndarray:
    """Return the 16 random bits of each element: the oracle."""
    element = np.arange(first, first + num, dtype=np.uint64)
    pair = element >> np.uint64(1)
    out = np.empty(num, dtype=np.uint64)
    for high in np.unique(pair >> np.uint64(32)):
        before, inside = map(np.uint64, key_of(seed, stream, step, name, int(high)))
        x = ((pair & MASK) * np.uint64(0x9E3779B9) + before) & MASK
        x ^= x >> np.uint64(16)
        x = (x * np.uint64(0x7FEB352D) + inside) & MASK
        x ^= x >> np.uint64(15)
        x = (x * np.uint64(0x846CA68B)) & MASK
        x ^= x >> np.uint64(16)
        mine = pair >> np.uint64(32) == high
        odd = element & np.uint64(1)
        out[mine] = ((x >> (odd * np.uint64(16))) & np.uint64(0xFFFF))[mine]
    return out


def rounded_by_oracle(values: torch.Tensor, *key: int, first: int, name: Name = None) -> np.ndarray:
    bits = quieted(bits_of(values))
    return ((bits + random_16(*key, first, len(values), name)) >> np.uint64(16)).astype(np.uint16)


def rounded(
    values: torch.Tensor,
    *,
    key: tuple[int, int, int] = (0, 0, 0),
    first: int = 0,
    name: Name = None,
) -> torch.Tensor:
    out = torch.full((len(values),), 7.0, dtype=torch.bfloat16)
    if name is None:
        key_of = partial(rounding_keys.element_space_key, *key)
    else:
        key_of = partial(rounding_keys.parameter_key, *key, name)
    round_stochastic(values, out, key=key_of, first_element=first, scratch=Scratch())
    return out


def every_kind(num: int = 20_000) -> torch.Tensor:
    """Return arbitrary bit patterns: every magnitude, denormals, infinities, NaN."""
    bits = np.random.default_rng(5).integers(0, 1 << 32, num, dtype=np.uint32)
    bits[:8] = [0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 1]
    return floats(bits.astype(np.uint64))


@pytest.mark.parametrize(
    ("name", "key", "first"),
    [
        (None, (0, 0, 0), 0),
        (None, (1, 2, 3), (1 << 33) - 10_001),
        (None, (-7, 0xFFFFFFFF, 10**12), (1 << 40) + 3),
        ("layers.0.norm.weight", (1, 2, 3), 1),
        ("layers.0.norm.weight", (2**80, -1, 1), (1 << 33) - 10_000),
        ("", (0, 0, 0), 4095),
    ],
)
def test_stochastic_rounding_is_the_formats(name, key, first, set_threads):
    values = every_kind()
    expected = rounded_by_oracle(values, *key, first=first, name=name)
    for num_threads in (1, 2):
        set_threads(num_threads)
        out = rounded(values, key=key, first=first, name=name)
        assert np.array_equal(bits_of(out), expected)
    assert torch.equal(values.view(torch.int32), every_kind().view(torch.int32))
    parts = [0, 1, 7, 4096, 4097, 12_345, 20_000]
    for start, stop in itertools.pairwise(parts):
        out = rounded(values[start:stop], key=key, first=first + start, name=name)
        assert np.array_equal(bits_of(out), expected[start:stop])


def test_a_value_becomes_one_of_its_two_neighbours_and_what_fits_stays():
    values = every_kind()
    nan = values.isnan().numpy()
    for step in range(3):
        out = rounded(values, key=(0, 0, step))
        assert np.array_equal(out.isnan().numpy(), nan)
        up = bits_of(out).astype(np.int64) - (bits_of(values) >> 16).astype(np.int64)
        assert set(up[~nan]) == {0, 1}
        exact = floats(ALL_16 << 16)
        exact = exact[~exact.isnan()]
        assert np.array_equal(bits_of(rounded(exact, key=(0, 0, step))), bits_of(exact) >> 16)


LENGTHS = {
    "many-short": ([64] * 200, "at-0"),
    "odd": ([1, 3, 33, 7, 1, 1, 255, 61] * 9, "odd"),
    "short-and-long": ([5, 9000, 7, 7, 4096, 4095, 3, 20_000, 4095, 4095, 1], "mixed"),
    "more-than-fit-together": ([16_383, 16_383, 16_384, 2] * 2 + [16_383] * 3, "across-2**33"),
    "one": ([30_000], "high"),
}


@pytest.mark.parametrize(("lengths", "firsts"), LENGTHS.values(), ids=LENGTHS)
def test_runs_of_several_parameters_are_rounded_as_each_alone(lengths, firsts):
    values = every_kind(sum(lengths))
    out = torch.full((len(values),), 7.0, dtype=torch.bfloat16)
    names = [f"parameter {number}" for number in range(len(lengths))]
    wanted, runs = [], []
    for number, (start, stop) in enumerate(itertools.pairwise(itertools.accumulate([0, *lengths]))):
        first = {
            "at-0": 0,
            "odd": 2 * number + 1,
            "across-2**33": (1 << 33) - number,
            "high": 1 << 40,
            "mixed": number << 31 | number % 3,
        }[firsts]
        runs.append(Piece(number, first, first + stop - start, start))
        part = values[start:stop]
        wanted.append(rounded_by_oracle(part, 3, STREAM, 5, first=first, name=names[number]))
    keys = rounding_keys.ParameterKeys(rounding_keys.name_numbers(names), 3, ARRAY, 5)
    round_runs(values, out, runs, keys=keys, scratch=Scratch())
    assert np.array_equal(bits_of(out), np.concatenate(wanted))


@pytest.mark.parametrize("part", [1, 0x4000, -0x8000, -0xFFFF], ids=hex)
def test_the_mean_is_the_value(part):
    step, sign, probability = 2.0**-7, 1 if part > 0 else -1, abs(part) / 65536
    values = torch.full((NUM,), sign * (1 + probability * step))
    up = (rounded(values, key=(part, 0, 0)).double() * sign - 1) / step
    sigma = (probability * (1 - probability) / NUM) ** 0.5
    assert abs(up.mean().item() - probability) < FIVE_SIGMA * sigma
