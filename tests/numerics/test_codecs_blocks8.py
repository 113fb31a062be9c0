"""8-bit blocks: what is kept, and what is lost.

Encoding and decoding are held, bit by bit, to a reimplementation in numpy's FP32, and to what the
format says they should be in FP64.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.numerics.blocks8 import (
    ALMOST,
    BLOCK,
    BOTH,
    MOMENTS,
    NORMAL,
    SIGNED,
    UNSIGNED,
    decode,
    encode,
    expected_codes,
    expected_values,
    largest_of_blocks,
    moments,
    per_element,
    recode,
    scale_bits,
)


@BOTH
@pytest.mark.parametrize("name", MOMENTS)
def test_the_bytes_are_those_of_numpy(name, dtype):
    values = moments(name, dtype)
    codes, scales = encode(values, dtype)
    expected, bits = expected_codes(values, dtype)
    assert np.array_equal(codes.numpy(), expected)
    assert np.array_equal(scale_bits(scales), bits)
    out = decode(codes, scales).numpy()
    assert np.array_equal(out.view(np.int32), expected_values(codes, scales).view(np.int32))


@BOTH
@pytest.mark.parametrize("name", NORMAL)
def test_a_scale_is_the_largest_rounded_up(name, dtype):
    values = moments(name, dtype)
    _, scales = encode(values, dtype)
    largest = largest_of_blocks(values).astype(np.float64)
    if dtype == UNSIGNED:
        largest = np.sqrt(largest)
    some = largest > 0
    assert some.any()
    ratio = scales.double().numpy()[some] / largest[some]
    assert ratio.min() >= 1 - 2.0**-21
    assert ratio.max() < 1 + 2.0**-7
    assert np.array_equal((scales == 0).numpy(), ~some)


@BOTH
@pytest.mark.parametrize("name", NORMAL)
def test_a_code_is_the_nearest_and_that_of_something_is_not_zero_if_unsigned(name, dtype):
    values = moments(name, dtype)
    codes, scales = encode(values, dtype)
    v, s = values.double().numpy(), per_element(scales, len(values))
    s = np.where(s > 0, s, 1)
    if dtype == SIGNED:
        exact = 127 * 2 * (v / s) / (1 + np.abs(v / s))
        nearest = np.ones_like(v, dtype=bool)
    else:
        exact = 255 * np.sqrt(v) / s
        nearest = (exact >= 0.5) | (exact == 0)
        assert np.array_equal(codes.numpy() == 0, v == 0)
        assert (codes.numpy()[~nearest] == 1).all()
    assert np.abs(exact - codes.numpy())[nearest].max(initial=0) <= 0.5 + ALMOST


@pytest.mark.parametrize("name", NORMAL)
def test_errors_of_signed_moments(name):
    values = moments(name, SIGNED)
    codes, scales = encode(values, SIGNED)
    s = per_element(scales, len(values))
    error = np.abs(decode(codes, scales).double().numpy() - values.double().numpy())
    # Half a code, by the slope of the inverse of f there: finest where most values are.
    slope = (s + np.abs(values.double().numpy())) ** 2 / np.where(s > 0, 2 * s, 1) / 127
    assert (error <= 0.5 * slope * 1.01 + 2.0**-149).all()


@pytest.mark.parametrize("name", NORMAL)
def test_a_root_is_off_by_half_a_code_and_never_too_small_by_more_than_a_third(name):
    values = moments(name, UNSIGNED)
    codes, scales = encode(values, UNSIGNED)
    decoded = decode(codes, scales).double().numpy() ** 0.5
    roots = values.double().numpy() ** 0.5
    unit = per_element(scales, len(values)) / 255
    # The smallest code is too large by up to one; squares of FP32 below 1e-38 are coarse.
    normal = roots > 2.0**-63
    limit = (np.where(roots < unit / 2, 1, 0.5) + ALMOST) * unit
    assert (np.abs(decoded - roots) <= limit)[normal].all()
    assert (decoded >= roots * (2 / 3 - ALMOST))[normal].all()


def test_an_update_is_never_much_larger_than_with_exact_moments():
    second = moments("every-magnitude", UNSIGNED).clamp(1e-36, 1e36)
    first = second.sqrt()  # as large as it can be after many equal gradients
    exact = first / (second.sqrt() + 1e-8)
    coded = first / (recode(second, UNSIGNED).sqrt() + 1e-8)
    assert (coded <= 1.51 * exact).all()
    assert coded.max() <= 1.51


@BOTH
def test_codes_are_not_biased(dtype):
    values = moments("heavy-tails", dtype)
    codes, scales = encode(values, dtype)
    v, s = values.double().numpy(), per_element(scales, len(values))
    exact = 254 * v / (s + np.abs(v)) if dtype == SIGNED else 255 * np.sqrt(v) / s
    typical = np.abs(exact) > 0.5
    error = (codes.numpy() - exact)[typical]
    assert abs(error.mean()) < 5 * error.std() / len(error) ** 0.5
    assert abs(error.std() - 12**-0.5) < 0.01


SCALES = [1.0, 1.0078125, 1.9921875, 0.1, 3e-4, 1e-14, 7e30]
SMALLEST_SCALE = {SIGNED: 2.0**-126, UNSIGNED: 2.0**-63}


def all_codes(dtype: torch.dtype, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return every code that is ever written, each block with the largest first."""
    largest = torch.iinfo(dtype).max
    lowest = -127 if dtype == SIGNED else 0
    codes = torch.arange(lowest, largest + 1, dtype=torch.int16)
    codes = torch.cat([codes, codes.new_zeros(-len(codes) % (BLOCK - 1))]).view(-1, BLOCK - 1)
    codes = torch.nn.functional.pad(codes, (1, 0), value=largest).reshape(-1).to(dtype)
    scales = torch.full((len(codes) // BLOCK,), scale, dtype=torch.bfloat16)
    return codes, scales


@BOTH
@pytest.mark.parametrize("scale", ["smallest", *SCALES])
def test_what_was_decoded_is_encoded_as_it_was(scale, dtype):
    number = SMALLEST_SCALE[dtype] if scale == "smallest" else scale
    codes, scales = all_codes(dtype, min(number, 1e18) if dtype == UNSIGNED else number)
    again = encode(decode(codes, scales), dtype)
    assert torch.equal(again[0], codes)
    assert torch.equal(again[1], scales)


@pytest.mark.parametrize("name", NORMAL)
def test_signed_blocks_are_encoded_as_they_were(name):
    codes, scales = encode(moments(name, SIGNED), SIGNED)
    again = encode(decode(codes, scales), SIGNED)
    assert torch.equal(again[0], codes)
    assert torch.equal(again[1], scales)


def every_largest() -> torch.Tensor:
    """Return blocks whose largest values fill [1, 4], so that their roots have every mantissa."""
    blocks = torch.zeros(1 << 16, BLOCK)
    blocks[:, 0] = torch.linspace(1, 4, 1 << 16)
    blocks[:, 1] = blocks[:, 0] * torch.linspace(0, 1, 1 << 16).roll(12345)
    return blocks.view(-1)


@pytest.mark.parametrize("name", [*NORMAL, "every-largest"])
def test_unsigned_blocks_settle_at_the_second_encoding(name):
    values = every_largest() if name == "every-largest" else moments(name, UNSIGNED) + 1e-36
    first = encode(values, UNSIGNED)
    second = encode(decode(*first), UNSIGNED)
    third = encode(decode(*second), UNSIGNED)
    assert torch.equal(third[0], second[0])
    assert torch.equal(third[1], second[1])
    down = scale_bits(first[1]).astype(int) - scale_bits(second[1])
    assert set(down) <= {0, 1}  # bfloat16 steps, never up
    same = np.repeat(down == 0, BLOCK)[: len(values)]
    assert np.array_equal(first[0].numpy()[same], second[0].numpy()[same])


@BOTH
@pytest.mark.parametrize("scale", SCALES)
def test_greater_codes_decode_to_greater_values(scale, dtype):
    lowest = -127 if dtype == SIGNED else 0
    codes = torch.arange(lowest, torch.iinfo(dtype).max + 1, dtype=torch.int16).to(dtype)
    scales = torch.full((-(-len(codes) // BLOCK),), min(scale, 1e18), dtype=torch.bfloat16)
    out = decode(codes, scales).double()
    assert (out.diff() > 0).all()
    top = scales[0].double()
    assert out[-1] == (top if dtype == SIGNED else top**2)
    assert (out == 0).sum() == 1
    assert out[-lowest] == 0
    if dtype == SIGNED:
        assert torch.equal(out, -out.flip(0))


@BOTH
def test_greater_values_get_greater_codes(dtype):
    lowest = -1 if dtype == SIGNED else 0
    for scale in (1.0, 1e-13):
        values = torch.linspace(lowest, 1, 310_000) * scale
        blocks = torch.nn.functional.pad(values.view(-1, BLOCK - 1), (1, 0), value=scale)
        codes, _ = encode(blocks.reshape(-1), dtype)
        codes = codes.view(-1, BLOCK)[:, 1:].reshape(-1).int()
        assert (codes.diff() >= 0).all()
        assert len(codes.unique()) == (255 if dtype == SIGNED else 256)
