"""8-bit blocks: what is kept of a moment, and what is lost.

Codes and scales are held, bit by bit, to numpy's FP32, and to what the format says in FP64.
Encoders are called themselves, since no optimizer can be given moments of a choice.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from offload.update.coding.blocks8 import TOO_LARGE
from offload.update.coding.codecs import Scratch, decode_blocks, encode_blocks

BLOCK = 32
SIGNED, UNSIGNED = torch.int8, torch.uint8
BOTH = pytest.mark.parametrize("dtype", [SIGNED, UNSIGNED], ids=["signed", "unsigned"])

# Of codes: FP32 rounds a few times before the code is rounded, so that almost-ties may go astray.
ALMOST = 1e-3


def encode(
    values: torch.Tensor, dtype: torch.dtype, scratch: Scratch | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.full((len(values),), 77, dtype=dtype)
    scales = torch.full((-(-len(values) // BLOCK),), 77.0, dtype=torch.bfloat16)
    before = values.clone()
    encode_blocks(values, codes, scales, scratch=scratch or Scratch())
    assert same_bits(before, values)
    return codes, scales


def decode(
    codes: torch.Tensor, scales: torch.Tensor, scratch: Scratch | None = None
) -> torch.Tensor:
    out = torch.full((len(codes),), 77.0)
    decode_blocks(codes, scales, out, scratch=scratch or Scratch())
    return out


def recode(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return decode(*encode(values, dtype))


def scale_bits(scales: torch.Tensor) -> np.ndarray:
    return scales.view(torch.int16).numpy().view(np.uint16)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def same(a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Compare codes and scales."""
    return torch.equal(a[0], b[0]) and np.array_equal(scale_bits(a[1]), scale_bits(b[1]))


def largest_of_blocks(values: torch.Tensor) -> np.ndarray:
    padded = np.zeros(-(-len(values) // BLOCK) * BLOCK, dtype=values.numpy().dtype)
    padded[: len(values)] = np.abs(values.numpy())
    return padded.reshape(-1, BLOCK).max(axis=1)


def rounded_up(largest: np.ndarray) -> np.ndarray:
    """Return bf16 bits of FP32 values: up, except from up to 2 (or 3, to even) units above."""
    bits = largest.view(np.uint32).astype(np.uint64) + 0x7FFD
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def floats(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def expected_codes(values: torch.Tensor, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return codes and the bits of scales, in numpy's FP32: the oracle for finite values."""
    v, largest = values.numpy(), largest_of_blocks(values)
    one = np.float32(1)
    with np.errstate(all="ignore"):
        if dtype == SIGNED:
            bits = rounded_up(largest)
            s = np.repeat(np.maximum(floats(bits), np.float32(2.0**-149)), BLOCK)[: len(v)]
            return np.rint(np.float32(254) * v / (np.abs(v) + s)).astype(np.int8), bits
        bits = rounded_up(one / (one / np.sqrt(largest)))
        s = np.repeat(np.maximum(floats(bits), np.float32(2.0**-100)), BLOCK)[: len(v)]
        codes = np.rint(np.float32(255) * (one / s) / (one / np.sqrt(v)))
    return np.maximum(codes, v > 0).astype(np.uint8), bits


def expected_values(codes: torch.Tensor, scales: torch.Tensor) -> np.ndarray:
    c = codes.numpy().astype(np.float32)
    s = np.repeat(floats(scale_bits(scales)), BLOCK)[: len(c)]
    if codes.dtype == SIGNED:
        return c / (np.float32(254) - np.abs(c)) * s
    root = c * np.float32(1 / 255) * s
    return root * root


def normal(num: int, seed: int, power: int = 0) -> torch.Tensor:
    values = torch.randn(num, generator=torch.Generator().manual_seed(seed)).clamp(-3.9, 3.9)
    return torch.ldexp(values, torch.tensor(power))


def dead_units(num: int) -> torch.Tensor:
    values = normal(num, 11)
    values[::7] = 0
    values[::11] = -0.0
    values[64:160] = 0
    return values


EXPONENTS = torch.randint(-126, 118, (8000,), generator=torch.Generator().manual_seed(9))
MOMENTS = {
    "tiny-second-moments": normal(8000, 3, -100),
    "denormal": normal(8000, 4, -140),
    "almost-denormal": normal(8000, 5, -124),
    "huge": normal(8000, 6, 118),
    "heavy-tails": normal(8000, 7) / normal(8000, 8),
    "every-magnitude": torch.ldexp(normal(8000, 10).clamp(-1.9, 1.9), EXPONENTS),
    "block-by-block-another": normal(8000, 2)
    * torch.logspace(-35, 30, 250).repeat_interleave(BLOCK),
    "equal": torch.full((1000,), 0.1),
    "zeros": torch.zeros(1000),
    "negative-zeros": -torch.zeros(1000),
    "dead-units": dead_units(8000),
    "no-whole-block": normal(31, 12),
    "a-last-block-of-1": normal(6401, 13),
    "none": torch.zeros(0),
}

# Where bfloat16 can hold the scale to eight bits.
NORMAL = [n for n in MOMENTS if n not in ("denormal", "zeros", "negative-zeros", "none")]


def moments(name: str, dtype: torch.dtype) -> torch.Tensor:
    values = MOMENTS[name].clone()
    return values if dtype == SIGNED else torch.where(values == 0, values, values.abs())


@BOTH
@pytest.mark.parametrize("name", MOMENTS)
def test_the_bytes_are_those_of_numpy(name, dtype):
    values = moments(name, dtype)
    codes, scales = encode(values, dtype)
    expected, bits = expected_codes(values, dtype)
    assert np.array_equal(codes.numpy(), expected)
    assert np.array_equal(scale_bits(scales), bits)
    out = decode(codes, scales)
    assert np.array_equal(out.numpy().view(np.int32), expected_values(codes, scales).view(np.int32))
    zeros = values == 0
    assert same_bits(out[zeros], torch.zeros(int(zeros.sum())))
    if dtype == UNSIGNED and name != "denormal":
        assert torch.equal(out == 0, zeros)


@BOTH
@pytest.mark.parametrize("name", NORMAL)
def test_a_scale_is_the_largest_rounded_up_and_a_code_the_nearest(name, dtype):
    values = moments(name, dtype)
    codes, scales = encode(values, dtype)
    largest = largest_of_blocks(values).astype(np.float64)
    if dtype == UNSIGNED:
        largest = np.sqrt(largest)
    ratio = scales.double().numpy()[largest > 0] / largest[largest > 0]
    assert 1 - 2.0**-21 <= ratio.min() <= ratio.max() < 1 + 2.0**-7
    v = values.double().numpy()
    s = np.repeat(scales.double().numpy(), BLOCK)[: len(v)]
    s = np.where(s > 0, s, 1)
    if dtype == SIGNED:
        exact = 127 * 2 * (v / s) / (1 + np.abs(v / s))
        nearest = np.ones_like(v, dtype=bool)
    else:
        exact = 255 * np.sqrt(v) / s
        nearest = (exact >= 0.5) | (exact == 0)
        assert np.array_equal(codes.numpy() == 0, v == 0)
        assert (codes.numpy()[~nearest] == 1).all(), "no second moment becomes zero"
    assert np.abs(exact - codes.numpy())[nearest].max(initial=0) <= 0.5 + ALMOST


@pytest.mark.parametrize("name", NORMAL)
def test_what_was_decoded_is_encoded_as_it_was(name):
    """Signed blocks at once; unsigned ones settle at the second encoding, and never go up."""
    signed = encode(moments(name, SIGNED), SIGNED)
    assert same(encode(decode(*signed), SIGNED), signed)
    first = encode(moments(name, UNSIGNED) + 1e-36, UNSIGNED)
    second = encode(decode(*first), UNSIGNED)
    assert same(encode(decode(*second), UNSIGNED), second)
    assert set(scale_bits(first[1]).astype(int) - scale_bits(second[1])) <= {0, 1}


def test_the_largest_finite_second_moments_are_kept():
    values = torch.full((BLOCK,), torch.finfo(torch.float32).max)
    values[1:] = torch.linspace(1e38, 3e38, BLOCK - 1)
    out = recode(values, UNSIGNED)
    assert out[0] == float("inf"), "the square of the scale, which is rounded up"
    assert ((out[1:] / values[1:] - 1).abs() < 0.01).all()


NAN, INFINITY = float("nan"), float("inf")
BAD = {
    "nan": (SIGNED, [NAN]),
    "nan-of-second-moments": (UNSIGNED, [NAN]),
    "infinity": (SIGNED, [INFINITY]),
    "infinity-of-second-moments": (UNSIGNED, [INFINITY]),
    "minus-infinity": (SIGNED, [-INFINITY]),
    "both-infinities": (SIGNED, [INFINITY, -INFINITY]),
    "infinity-and-nan": (UNSIGNED, [NAN, INFINITY]),
    "too-large": (SIGNED, [TOO_LARGE]),
    "too-large-negative": (SIGNED, [-TOO_LARGE]),
    "negative": (UNSIGNED, [-1.0]),
    "negative-tiny": (UNSIGNED, [-1e-45]),
}


@pytest.mark.parametrize(("dtype", "bad"), BAD.values(), ids=BAD)
@pytest.mark.parametrize("others", ["heavy-tails", "dead-units"])
def test_a_block_that_is_not_finite_decodes_to_nan_and_no_other(others, dtype, bad):
    """Its bytes are the same wherever the tensor is cut."""
    length, damaged = BLOCK * 40 + 7, [0, 3, 4, 17, 38, 40]
    values = moments(others, dtype)[:length].clone()
    good = recode(values, dtype)
    for block in damaged:
        at = block * BLOCK + block % 5
        values[at : at + len(bad)] = torch.tensor(bad)
    codes, scales = encode(values, dtype)
    out = decode(codes, scales)
    inside = torch.isin(torch.arange(length) // BLOCK, torch.tensor(damaged))
    assert out[inside].isnan().all()
    assert same_bits(out[~inside], good[~inside])
    assert not codes[inside].any()
    assert (scale_bits(scales)[damaged] == 0x7FC0).all()
    assert_cuts_do_not_matter(values, (codes, scales), [0, 32, 128, 160, 1216, length])


def assert_cuts_do_not_matter(
    values: torch.Tensor, whole: tuple[torch.Tensor, torch.Tensor], cuts: list[int]
) -> None:
    out, scratch = decode(*whole), Scratch()
    for start, stop in itertools.pairwise(cuts):
        blocks = slice(start // BLOCK, -(-stop // BLOCK))
        part = encode(values[start:stop], whole[0].dtype, scratch)
        assert same(part, (whole[0][start:stop], whole[1][blocks]))
        assert same_bits(decode(*part, scratch), out[start:stop])


@BOTH
@pytest.mark.parametrize("name", ["every-magnitude", "dead-units", "a-last-block-of-1"])
def test_neither_cuts_nor_threads_matter(name, dtype, set_threads):
    """Cuts lie at multiples of 32, and memory for intermediate values is used again."""
    values = moments(name, dtype)
    whole = encode(values, dtype)
    cuts = [0, 32, 96, 1024, 1056, 4096, 6400, len(values)]
    assert_cuts_do_not_matter(values, whole, cuts)
    many = values[: len(values) // BLOCK * BLOCK].repeat(20)
    alone = encode(many, dtype)
    set_threads(2)
    assert same(encode(many, dtype), alone)


@BOTH
@pytest.mark.parametrize("length", [0, 1, 31, 32, 33, 65, 1000])
def test_any_length_with_scratch_that_was_used_before(length, dtype):
    values, scratch = moments("heavy-tails", dtype)[:2000], Scratch()
    for other in (7, 2000, 64, length):
        found = encode(values[:other], dtype, scratch)
        out = decode(*found, scratch)
    expected, bits = expected_codes(values[:length], dtype)
    assert np.array_equal(found[0].numpy(), expected)
    assert np.array_equal(scale_bits(found[1]), bits)
    assert same_bits(out, decode(*found))
