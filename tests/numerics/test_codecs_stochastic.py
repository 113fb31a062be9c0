"""Stochastic rounding: right on average, and the same bits wherever a tensor is cut.

The library is held, bit by bit, to an oracle in 64-bit integers; the oracle's random numbers are
then tested as such. Every seed is fixed, so every figure is the same in every run; the bounds are
five standard deviations, which one test in a million passes by chance.
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
from offload.update.coding.codecs import Scratch, round_runs, round_stochastic

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


def expected(
    values: torch.Tensor, seed: int, stream: int, step: int, first: int, name: Name = None
) -> np.ndarray:
    bits = values.view(torch.int32).numpy().view(np.uint32).astype(np.uint64)
    nan = (bits & np.uint64(0x7FFFFFFF)) > 0x7F800000
    bits = np.where(nan, bits & np.uint64(0x80000000) | np.uint64(0x7FC00000), bits)
    random = random_16(seed, stream, step, first, len(values), name)
    return ((bits + random) >> np.uint64(16)).astype(np.uint16)


def keys(seed: int, stream: int, step: int, name: Name = None) -> rounding_keys.KeyOf:
    if name is None:
        return partial(rounding_keys.element_space_key, seed, stream, step)
    return partial(rounding_keys.parameter_key, seed, stream, step, name)


def rounded(
    values: torch.Tensor,
    *,
    seed: int = 0,
    stream: int = 0,
    step: int = 0,
    first_element: int = 0,
    name: Name = None,
) -> torch.Tensor:
    out = torch.full((len(values),), 7.0, dtype=torch.bfloat16)
    round_stochastic(
        values,
        out,
        key=keys(seed, stream, step, name),
        first_element=first_element,
        scratch=Scratch(),
    )
    return out


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.int16).numpy().view(np.uint16)


def every_kind(num: int = 30_000) -> torch.Tensor:
    """Return arbitrary bit patterns: every magnitude, denormals, infinities, NaN."""
    bits = np.random.default_rng(5).integers(0, 1 << 32, num, dtype=np.uint32)
    bits[:8] = [0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 1]
    return torch.from_numpy(bits.view(np.int32)).view(torch.float32)


NAMES = [None, "layers.0.norm.weight", ""]


@pytest.mark.parametrize(
    ("seed", "stream", "step"),
    [(0, 0, 0), (1, 2, 3), (-7, 0xFFFFFFFF, 10**12), (2**80, -1, 1)],
    ids=["zeros", "small", "large", "beyond-64-bits"],
)
@pytest.mark.parametrize(
    "first",
    [0, 1, 32, 4095, (1 << 32) - 17, (1 << 33) - 16_001, (1 << 33) - 16_000, (1 << 40) + 3],
)
@pytest.mark.parametrize("name", NAMES, ids=str)
def test_it_is_the_oracle(name, first, seed, stream, step):
    values = every_kind()
    before = values.view(torch.int32).clone()
    out = rounded(values, seed=seed, stream=stream, step=step, first_element=first, name=name)
    assert np.array_equal(bits_of(out), expected(values, seed, stream, step, first, name))
    assert torch.equal(values.view(torch.int32), before)


def test_every_bfloat16_stays_what_it_is():
    exact = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    exact = exact[~exact.isnan()]
    for step in range(20):
        assert np.array_equal(bits_of(rounded(exact.float(), step=step)), bits_of(exact))


def test_a_value_becomes_one_of_its_two_neighbours_and_a_nan_a_nan():
    values = every_kind()
    bits = values.view(torch.int32).numpy().view(np.uint32)
    nan = values.isnan().numpy()
    for step in range(5):
        out = rounded(values, step=step)
        assert np.array_equal(out.isnan().numpy(), nan)
        up = bits_of(out).astype(np.int64) - (bits >> 16)
        assert set(up[~nan]) == {0, 1}


def test_a_value_beyond_the_largest_becomes_that_or_infinite():
    out = rounded(torch.full((NUM,), torch.finfo(torch.float32).max))
    largest = torch.finfo(torch.bfloat16).max
    assert set(out.unique().tolist()) == {largest, float("inf")}
    assert out.isinf().float().mean() > 0.99  # it is 65535 parts of 65536 up


@pytest.mark.parametrize("first", [0, 1, (1 << 33) - 5000], ids=["at-0", "at-1", "across-2**33"])
def test_it_does_not_matter_how_a_tensor_is_cut(first):
    values = every_kind(10_000)
    whole = bits_of(rounded(values, seed=3, first_element=first))
    rng, scratch = np.random.default_rng(1), Scratch()
    for _ in range(5):
        inner = rng.choice(len(values), 12, replace=False).tolist()
        out = torch.empty(len(values), dtype=torch.bfloat16)
        for start, stop in itertools.pairwise(sorted([0, 0, 1, *inner, len(values)])):
            round_stochastic(
                values[start:stop],
                out[start:stop],
                key=keys(3, 0, 0),
                first_element=first + start,
                scratch=scratch,
            )
        assert np.array_equal(bits_of(out), whole)


LENGTHS = {
    "many-short": [64] * 200,
    "odd": [1, 3, 33, 7, 1, 1, 255, 61] * 9,
    "short-and-long": [5, 9000, 7, 7, 4096, 4095, 3, 20_000, 4095, 4095, 1],
    "more-than-fit-together": [16_383, 16_383, 16_384, 2] * 3 + [16_383] * 5,
    "one": [30_000],
    "one-short": [17],
}


@pytest.mark.parametrize("firsts", ["at-0", "odd", "across-2**33", "high", "mixed"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
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
        wanted.append(expected(values[start:stop], 3, STREAM, 5, first, names[number]))
    before = values.view(torch.int32).clone()
    keys = rounding_keys.ParameterKeys(rounding_keys.name_numbers(names), 3, ARRAY, 5)
    round_runs(values, out, runs, keys=keys, scratch=Scratch())
    assert np.array_equal(bits_of(out), np.concatenate(wanted))
    assert torch.equal(values.view(torch.int32), before)


def test_keys_of_all_parameters_at_once_are_those_of_each():
    names = [f"layers.{number}.weight" for number in range(50)] + ["", "Größe", "\ud800"]
    numbers = rounding_keys.name_numbers(names)
    for seed, array, step in [(0, "exp_avg", 1), (-(2**70), "exp_avg_sq", 10**12)]:
        found = rounding_keys.ParameterKeys(numbers, seed, array, step)
        stream = rounding_keys.stream_of(array)
        for number, name in enumerate(names):
            for window in (0, 1, 5, 2**30 - 1):
                alone = rounding_keys.parameter_key(seed, stream, step, name, window)
                assert found.of(number)(window) == alone
    assert rounding_keys.parameter_key(1, 2, 3, "a", 4) == key_of(1, 2, 3, "a", 4)


def test_the_bytes_do_not_depend_on_the_number_of_threads(set_threads):
    values = every_kind(200_000)
    alone = bits_of(rounded(values))
    set_threads(2)
    assert np.array_equal(bits_of(rounded(values)), alone)


@pytest.mark.parametrize("sign", [1, -1], ids=["positive", "negative"])
@pytest.mark.parametrize("part", [1, 100, 0x4000, 0x8000, 0xC123, 0xFFFF], ids=hex)
def test_the_mean_is_the_value(part, sign):
    step = 2.0**-7
    probability = part / 65536
    values = torch.full((NUM,), sign * (1 + probability * step))
    up = (rounded(values, seed=part).double() * sign - 1) / step
    sigma = (probability * (1 - probability) / NUM) ** 0.5
    assert abs(up.mean().item() - probability) < FIVE_SIGMA * sigma


def test_small_steps_add_up():
    """Each is a 32nd of what bfloat16 can tell from 1, and lost in rounding to nearest."""
    value = nearest = torch.ones(4096, dtype=torch.bfloat16)
    for step in range(640):
        value = rounded(value.float() + 2.0**-12, step=step)
        nearest = (nearest.float() + 2.0**-12).bfloat16()
    assert (nearest == 1).all()
    # Each step's variance is at most (2**-7)**2 * (1/32)(31/32).
    sigma = 2.0**-7 * (640 / 32 / 4096) ** 0.5
    assert abs(value.double().mean().item() - (1 + 640 * 2.0**-12)) < FIVE_SIGMA * sigma


def chi_square(cells: np.ndarray, num_cells: int) -> float:
    """Return by how many standard deviations counts differ from uniform ones.

    By Wilson and Hilferty, whose tails are right also with few cells.
    """
    counts = np.bincount(cells.astype(np.int64), minlength=num_cells)
    mean, degrees = len(cells) / num_cells, num_cells - 1
    statistic = ((counts - mean) ** 2 / mean).sum()
    spread = 2 / (9 * degrees)
    return ((statistic / degrees) ** (1 / 3) - (1 - spread)) / spread**0.5


KEYS = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (12345, 678, 90)]


@pytest.mark.parametrize("name", [None, "weight"], ids=str)
@pytest.mark.parametrize("key", KEYS, ids=str)
@pytest.mark.parametrize("first", [0, 1 << 31, (1 << 33) + 1], ids=["low", "middle", "high"])
def test_random_numbers_are_uniform(key, first, name):
    random = random_16(*key, first, NUM, name)
    assert abs(chi_square(random, 1 << 16)) < FIVE_SIGMA
    for shift in range(0, 16, 4):
        assert abs(chi_square(random >> np.uint64(shift) & np.uint64(15), 16)) < FIVE_SIGMA
    for half in (random[::2], random[1::2]):
        assert abs(chi_square(half >> np.uint64(8), 256)) < FIVE_SIGMA
        assert abs(chi_square(half & np.uint64(255), 256)) < FIVE_SIGMA


def related(a: np.ndarray, b: np.ndarray) -> float:
    """Return the largest of eight measures of dependence, in standard deviations."""
    x, y = (v.astype(np.float64) - 32767.5 for v in (a, b))
    measures = [(x * y).mean() / (65536**2 / 12) * len(a) ** 0.5]
    upper, middle, lower = (np.uint64(s) for s in (11, 5, 0))
    for mine, theirs in ((upper, upper), (middle, middle), (lower, lower), (upper, lower)):
        pair = (a >> mine & np.uint64(31)) * np.uint64(32) + (b >> theirs & np.uint64(31))
        measures.append(chi_square(pair, 1024))
    difference, exclusive = (a - b) & np.uint64(0xFFFF), a ^ b
    measures.append(chi_square(difference >> np.uint64(6), 1024))
    measures.append(chi_square(exclusive >> np.uint64(6), 1024))
    measures.append(chi_square(exclusive & np.uint64(1023), 1024))
    return max(abs(m) for m in measures)


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 8, 16, 32, 64, 256, 1024, 4096, 65536])
@pytest.mark.parametrize("key", KEYS, ids=str)
def test_neighbours_are_independent(key, lag):
    random = random_16(*key, 0, NUM + lag)
    assert related(random[:-lag], random[lag:]) < FIVE_SIGMA


@pytest.mark.parametrize("name", [None, "weight"], ids=str)
@pytest.mark.parametrize("which", range(3), ids=["seeds", "streams", "steps"])
@pytest.mark.parametrize("other", [1, 2, 3, 10, 256, 65536])
def test_seeds_streams_and_steps_are_independent(which, other, name):
    key = [7, 7, 7]
    a = random_16(*key, 0, NUM, name)
    key[which] += other
    b = random_16(*key, 0, NUM, name)
    assert related(a, b) < FIVE_SIGMA
    assert related(a[1:], b[:-1]) < FIVE_SIGMA
    assert related(a[:-1], b[1:]) < FIVE_SIGMA


@pytest.mark.parametrize("lag", [0, 1, 32])
@pytest.mark.parametrize("first", [0, 1 << 33], ids=["low", "high"])
@pytest.mark.parametrize("names", [("a", "b"), ("w.0", "w.1"), ("layers.10.w", "layers.11.w")])
def test_parameters_are_independent(names, first, lag):
    a, b = (random_16(7, 7, 7, first, NUM + lag, name) for name in names)
    assert related(a[lag:], b[: len(b) - lag]) < FIVE_SIGMA


def test_windows_of_a_parameter_are_independent():
    a, b, c = (random_16(7, 7, 7, window << 33, NUM, "weight") for window in range(3))
    assert max(related(a, b), related(b, c), related(a, c)) < FIVE_SIGMA


def test_a_short_parameter_is_independent_from_all_others_and_from_step_to_step():
    """Each gets a few numbers from its own key: they are as good as many from one."""
    by_name = np.stack([random_16(0, 0, 0, 0, 64, f"layers.{n}.norm") for n in range(1 << 12)])
    assert abs(chi_square(by_name.ravel(), 1 << 16)) < FIVE_SIGMA
    assert related(by_name[:-1].ravel(), by_name[1:].ravel()) < FIVE_SIGMA
    by_step = np.stack([random_16(0, 0, step, 0, 64, "norm") for step in range(1 << 12)])
    assert abs(chi_square(by_step.ravel(), 1 << 16)) < FIVE_SIGMA
    assert related(by_step[:-1].ravel(), by_step[1:].ravel()) < FIVE_SIGMA


@pytest.mark.parametrize("name", [None, "weight"], ids=str)
def test_an_element_is_independent_from_step_to_step(name):
    random = np.stack([random_16(0, 0, step, 0, 1 << 10, name) for step in range(1 << 8)])
    assert related(random[:-1].ravel(), random[1:].ravel()) < FIVE_SIGMA
    # and the mean over steps is as scattered over elements as that of random numbers
    means = (random.mean(axis=0) - 32767.5) / (65536 / 12**0.5 / 16)
    assert abs(means.var() - 1) < FIVE_SIGMA * (2 / len(means)) ** 0.5
    assert np.abs(means).max() < FIVE_SIGMA
