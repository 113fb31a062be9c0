"""Split masters lose nothing: a bf16 parameter and 16 bits make up the FP32 master again.

Checked for every upper half with telling lower halves, and for every lower half with telling upper
ones, against 64-bit integer arithmetic.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from offload.update.coding.codecs import Scratch, join_master, split_master

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


def pattern(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """Return FP32 bits of all combinations of halves."""
    return ((high[:, None] << 16) | low[None, :]).ravel().astype(np.uint64)


def every_high() -> np.ndarray:
    return pattern(ALL_16, TELLING_LOWS)


def every_low(highs: list[int]) -> np.ndarray:
    both_signs = np.array([h | sign for h in highs for sign in (0, 0x8000)], dtype=np.uint64)
    return pattern(both_signs, ALL_16)


PATTERNS = {
    "every-upper-half": every_high,
    **{f"every-lower-half-{k}": lambda v=v: every_low(v) for k, v in TELLING_HIGHS.items()},
}


def round_half_away(bits: np.ndarray) -> np.ndarray:
    """Return the bf16 bits of FP32 bits, to nearest and ties away from zero: the oracle."""
    sign, magnitude = bits & SIGN, bits & 0x7FFFFFFF
    rounded = (magnitude >> 16) + ((magnitude & 0xFFFF) >= 0x8000)
    rounded = np.where(magnitude > INFINITY, QUIET >> 16, rounded)
    return (sign >> 16) | rounded


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


@pytest.mark.parametrize("make", PATTERNS.values(), ids=PATTERNS)
def test_every_bit_pattern_is_recovered(make):
    bits = make()
    master = floats(bits)
    live, low = split(master)
    assert np.array_equal(bits_of(master), bits), "the master is left as it was"
    assert np.array_equal(bits_of(live), round_half_away(bits))
    assert np.array_equal(bits_of(low), quieted(bits) & 0xFFFF)
    assert np.array_equal(bits_of(join(live, low)), quieted(bits))


@pytest.mark.parametrize("make", PATTERNS.values(), ids=PATTERNS)
def test_numbers_are_split_alike_with_and_without_a_nan_among_them(make):
    bits = make()
    numbers = bits[(bits & 0x7FFFFFFF) <= INFINITY]
    live, low = split(floats(numbers))
    with_nan = split(floats(np.append(numbers, 0xFFFFFFFF)))
    assert np.array_equal(bits_of(with_nan[0])[:-1], bits_of(live))
    assert np.array_equal(bits_of(with_nan[1])[:-1], bits_of(low))
    assert np.array_equal(bits_of(join(*with_nan))[:-1], bits_of(join(live, low)))


def test_the_oracle_rounds_to_the_nearest_and_ties_away_from_zero():
    bits = every_high()
    bits = bits[(bits & 0x7FFFFFFF) < 0x7F7F0000]
    value = floats(bits).double().numpy()
    candidates = np.stack([(((bits >> 16) + up) << 16) for up in (0, 1)])
    # bf16 neighbours of a magnitude: truncated, and the next
    truncated, following = (floats(c).double().numpy() for c in candidates)
    away = np.abs(value - following) <= np.abs(value - truncated)
    assert np.array_equal(round_half_away(bits), (bits >> 16) + away)


def test_it_differs_from_torch_only_in_ties():
    bits = every_high()
    bits = bits[(bits & 0x7FFFFFFF) <= INFINITY]
    master = floats(bits)
    live, _ = split(master)
    differs = live.view(torch.int16) != master.bfloat16().view(torch.int16)
    ties = torch.from_numpy((bits & 0xFFFF) == 0x8000)
    assert differs.any()
    assert not (differs & ~ties).any()


def test_the_largest_masters_are_recovered_from_infinite_parameters():
    bits = pattern(np.array([0x7F7F, 0xFF7F], dtype=np.uint64), ALL_16[0x8000:])
    live, low = split(floats(bits))
    assert live.isinf().all()
    assert np.array_equal(bits_of(join(live, low)), bits)


@pytest.mark.parametrize(
    "bits",
    [
        0x7F800001,
        0x7F807FFF,
        0x7F808000,
        0x7FBFFFFF,
        0x7FC00000,
        0x7FFF7FFF,
        0x7FFF8000,
        0x7FFFFFFF,
    ],
    ids=hex,
)
@pytest.mark.parametrize("sign", [0, SIGN], ids=["positive", "negative"])
def test_a_nan_stays_a_nan_of_its_sign(bits, sign):
    live, low = split(floats(np.array([bits | sign], dtype=np.uint64)))
    assert live.isnan().all()
    assert bits_of(join(live, low)) == QUIET | sign


def edited() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return halves that no split makes together: the parameter was changed in between."""
    telling = [high for highs in TELLING_HIGHS.values() for high in highs]
    selected = np.array([high | sign for high in telling for sign in (0, 0x8000)])
    return {
        "every-parameter": tuple(x.ravel() for x in np.meshgrid(ALL_16, TELLING_LOWS)),
        "every-remainder": tuple(x.ravel() for x in np.meshgrid(selected, ALL_16)),
    }


@pytest.mark.parametrize("halves", edited().values(), ids=edited())
def test_an_edited_parameter_is_what_the_new_master_rounds_to(halves):
    live_bits, low_bits = (h.astype(np.uint16).view(np.int16) for h in halves)
    live = torch.from_numpy(live_bits).view(torch.bfloat16)
    master = join(live, torch.from_numpy(low_bits))
    nan = live.isnan().numpy()
    assert np.array_equal(master.isnan().numpy(), nan)
    rounded = round_half_away(bits_of(master))
    assert np.array_equal(rounded[~nan], bits_of(live)[~nan])


@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["plus", "minus"])
def test_a_parameter_set_to_zero_is_a_master_next_to_zero(sign):
    live = torch.full((1 << 16,), sign * 0.0, dtype=torch.bfloat16)
    low = torch.from_numpy(ALL_16.astype(np.uint16).view(np.int16))
    master = join(live, low)
    assert master.abs().max() < 1e-40
    assert (master.signbit() == (sign < 0)).all()


@pytest.mark.parametrize("num", [0, 1, 7, 31, 33, 1000])
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_any_length_at_any_offset_with_scratch_that_was_used_before(num, offset):
    master = torch.randn(2000, generator=torch.Generator().manual_seed(num))
    live, low = torch.zeros(2000).bfloat16(), torch.zeros(2000, dtype=torch.int16)
    out, scratch = torch.zeros(2000), Scratch()
    cut = slice(offset, offset + num)
    for size in (1000, num, 5, num):
        other = torch.randn(size)
        split_master(other, other.bfloat16(), torch.zeros(size, dtype=torch.int16), scratch=scratch)
        split_master(master[cut], live[cut], low[cut], scratch=scratch)
        join_master(live[cut], low[cut], out[cut], scratch=scratch)
    assert torch.equal(out[cut], master[cut])
    for untouched in (live, low, out):
        assert not untouched[:offset].any()
        assert not untouched[offset + num :].any()


def test_the_bytes_do_not_depend_on_the_number_of_threads(set_threads):
    master = floats(every_high())
    alone = split(master)
    set_threads(2)
    for ours, theirs in zip(split(master), alone, strict=True):
        assert np.array_equal(bits_of(ours), bits_of(theirs))
    assert np.array_equal(bits_of(join(*alone)), quieted(bits_of(master)))
