"""8-bit blocks: zeros, denormals and NaN, any length, and cuts, threads and scratch memory.

Nothing becomes finite that was not, and nothing becomes zero that would blow up an update.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from offload.update.coding.blocks8 import TOO_LARGE
from offload.update.coding.codecs import Scratch, decode_blocks, encode_blocks
from tests.numerics.blocks8 import (
    BLOCK,
    BOTH,
    SIGNED,
    UNSIGNED,
    decode,
    encode,
    expected_codes,
    moments,
    normal,
    recode,
    same_bits,
    scale_bits,
)


@BOTH
@pytest.mark.parametrize("name", ["zeros", "negative-zeros"])
def test_zeros_stay_zeros(name, dtype):
    values = moments(name, dtype)
    codes, scales = encode(values, dtype)
    assert not codes.any()
    assert not scale_bits(scales).any()
    assert same_bits(decode(codes, scales), torch.zeros(len(values)))


@BOTH
def test_zeros_among_others_stay_zeros(dtype):
    values = moments("dead-units", dtype)
    out = recode(values, dtype)
    assert same_bits(out[values == 0], torch.zeros(int((values == 0).sum())))
    if dtype == UNSIGNED:
        assert torch.equal(out == 0, values == 0)


@pytest.mark.parametrize("zeros", [0, 1, 9], ids="with-{}-zeros".format)
@pytest.mark.parametrize("largest", [2.0**-126, 1e-30, 1e-8, 1.0, 3e38])
def test_a_second_moment_never_becomes_zero(largest, zeros):
    values = torch.full((BLOCK,), 1e-45)
    values[1:8] = largest * torch.tensor([1e-7, 1e-6, 3.8e-6, 3.9e-6, 1e-3, 0.5, 1.0])
    values[BLOCK - zeros :] = 0
    assert torch.equal(recode(values, UNSIGNED) > 0, values > 0)


@pytest.mark.parametrize("power", range(-149, -126))
def test_denormal_signed_moments_are_kept_to_a_508th_of_the_smallest_scale(power):
    values = torch.tensor([2.0**power, -(2.0**power) / 2, 0.0])
    error = (recode(values, SIGNED) - values).abs().max().item()
    assert error <= 2.0**power / 127 + 2.0**-133 / 253


@pytest.mark.parametrize("power", range(-149, -126))
def test_denormal_second_moments_are_kept_or_zero(power):
    values = torch.tensor([2.0**power, 0.0])
    out = recode(values, UNSIGNED)
    assert abs(out[0].item() / 2.0**power - 1) < 0.01 or power < -140
    assert out[1] == 0


NOT_FINITE = {
    "nan": [float("nan")],
    "infinity": [float("inf")],
    "minus-infinity": [float("-inf")],
    "both-infinities": [float("inf"), float("-inf")],
    "infinity-and-nan": [float("nan"), float("inf")],
}
BEYOND = {
    SIGNED: {"too-large": [TOO_LARGE], "too-large-negative": [-TOO_LARGE]},
    UNSIGNED: {"negative": [-1.0], "negative-tiny": [-1e-45]},
}


@pytest.mark.parametrize(
    ("dtype", "bad"),
    [
        pytest.param(dtype, bad, id=f"{name}-{'signed' if dtype == SIGNED else 'unsigned'}")
        for dtype in (SIGNED, UNSIGNED)
        for name, bad in {**NOT_FINITE, **BEYOND[dtype]}.items()
    ],
)
@pytest.mark.parametrize("length", [BLOCK * 10, BLOCK * 10 + 5], ids=["whole", "short-last-block"])
@pytest.mark.parametrize("others", ["normal", "dead-units", "zeros"])
def test_a_block_that_is_not_finite_decodes_to_nan_and_no_other(others, length, bad, dtype):
    values = moments(others, dtype)[:length].clone()
    good = recode(values, dtype)
    for block in (0, 4, (length - 1) // BLOCK):
        damaged = values.clone()
        damaged[block * BLOCK + 3 : block * BLOCK + 3 + len(bad)] = torch.tensor(bad)
        out = recode(damaged, dtype)
        inside = torch.arange(length) // BLOCK == block
        assert out[inside].isnan().all()
        assert same_bits(out[~inside], good[~inside])


@pytest.mark.parametrize(
    ("dtype", "bad"),
    [
        pytest.param(dtype, bad, id=f"{name}-{'signed' if dtype == SIGNED else 'unsigned'}")
        for dtype in (SIGNED, UNSIGNED)
        for name, bad in {**NOT_FINITE, **BEYOND[dtype]}.items()
    ],
)
@pytest.mark.parametrize("others", ["normal", "dead-units"])
def test_the_bytes_of_a_block_that_is_not_finite_are_the_same_wherever_it_is_cut(
    others, bad, dtype
):
    length = BLOCK * 40 + 7
    values = moments(others, dtype)[:length].clone()
    damaged = (0, 3, 4, 17, 38, 40)
    for block in damaged:
        at = block * BLOCK + block % 5
        values[at : at + len(bad)] = torch.tensor(bad)
    codes, scales = encode(values, dtype)
    for block in damaged:
        assert not codes[block * BLOCK : (block + 1) * BLOCK].any()
        assert scale_bits(scales)[block] == 0x7FC0
    assert codes.any()
    for cuts in ([0, length], range(0, length + BLOCK, BLOCK), [0, 32, 128, 160, 1216, length]):
        for start, stop in itertools.pairwise(cuts):
            part = encode(values[start:stop], dtype)
            blocks = slice(start // BLOCK, -(-stop // BLOCK))
            assert torch.equal(part[0], codes[start:stop])
            assert np.array_equal(scale_bits(part[1]), scale_bits(scales)[blocks])


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FFFFFFF, -1, -0x7FFFFF], ids=hex)
@BOTH
def test_any_nan_is_one(bits, dtype):
    values = torch.ones(BLOCK * 2)
    values.view(torch.int32)[40] = bits
    assert torch.equal(recode(values, dtype).isnan(), torch.arange(BLOCK * 2) >= BLOCK)


def test_the_largest_finite_second_moments_are_kept():
    values = torch.full((BLOCK,), torch.finfo(torch.float32).max)
    values[1:] = torch.linspace(1e38, 3e38, BLOCK - 1)
    out = recode(values, UNSIGNED)
    assert out[0] == float("inf"), "the square of the scale, which is rounded up"
    assert ((out[1:] / values[1:] - 1).abs() < 0.01).all()


@BOTH
@pytest.mark.parametrize("length", [0, 1, 5, 31, 32, 33, 63, 64, 65, 1000, 1024])
def test_any_length_with_scratch_that_was_used_before(length, dtype):
    values = moments("heavy-tails", dtype)[:2000]
    whole, whole_scales = encode(values, dtype)
    codes, scales = torch.zeros(2000, dtype=dtype), torch.zeros(63, dtype=torch.bfloat16)
    out, scratch = torch.zeros(2000), Scratch()
    num_scales = -(-length // BLOCK)
    for other in (7, 2000, length):
        used = (
            torch.zeros(other, dtype=dtype),
            torch.zeros(63, dtype=torch.bfloat16)[: -(-other // 32)],
        )
        encode_blocks(values[:other], *used, scratch=scratch)
        decode_blocks(*used, torch.zeros(other), scratch=scratch)
        encode_blocks(values[:length], codes[:length], scales[:num_scales], scratch=scratch)
        decode_blocks(codes[:length], scales[:num_scales], out[:length], scratch=scratch)
    aligned = length // BLOCK * BLOCK
    assert torch.equal(codes[:aligned], whole[:aligned])
    assert torch.equal(scales[: aligned // BLOCK], whole_scales[: aligned // BLOCK])
    expected, bits = expected_codes(values[:length], dtype)
    assert np.array_equal(codes[:length].numpy(), expected)
    assert np.array_equal(scale_bits(scales[:num_scales]), bits)
    assert same_bits(out[:length], decode(codes[:length], scales[:num_scales]))
    assert not codes[length:].any()
    assert not scales[num_scales:].any()
    assert not out[length:].any()


@BOTH
@pytest.mark.parametrize("name", ["every-magnitude", "dead-units", "a-last-block-of-1"])
def test_it_does_not_matter_where_a_tensor_is_cut_at_multiples_of_32(name, dtype):
    values = moments(name, dtype)
    codes, scales = encode(values, dtype)
    out = decode(codes, scales)
    cuts = [0, 32, 96, 1024, 4096, 6400, len(values)]
    for start, stop in itertools.pairwise(cuts):
        part = encode(values[start:stop], dtype)
        blocks = slice(start // BLOCK, -(-stop // BLOCK))
        assert torch.equal(part[0], codes[start:stop])
        assert torch.equal(part[1], scales[blocks])
        assert same_bits(decode(codes[start:stop], scales[blocks]), out[start:stop])


@BOTH
def test_the_bytes_do_not_depend_on_the_number_of_threads(dtype, set_threads):
    values = moments("every-magnitude", dtype).repeat(16)
    codes, scales = encode(values, dtype)
    out = decode(codes, scales)
    set_threads(2)
    again = encode(values, dtype)
    assert torch.equal(again[0], codes)
    assert torch.equal(again[1], scales)
    assert same_bits(decode(codes, scales), out)


def test_scratch_of_many_shapes_stays_small():
    scratch = Scratch()
    for length in range(1, 700):
        values = torch.ones(length)
        codes = torch.zeros(length, dtype=torch.uint8)
        scales = torch.zeros(-(-length // BLOCK), dtype=torch.bfloat16)
        encode_blocks(values, codes, scales, scratch=scratch)
        decode_blocks(codes, scales, values, scratch=scratch)
        assert torch.equal(values, torch.ones(length))
    assert len(scratch._views) <= 256
    assert sum(b.nbytes for b in scratch._buffers.values()) <= 14 * 700


@BOTH
def test_scratch_that_grew_is_one_memory(dtype):
    values, scratch = normal(2000, 1).abs(), Scratch()
    codes, scales = encode(values, dtype)
    out = torch.zeros(64)
    # The small decode and encode share memory by name, under different types of number.
    decode_blocks(codes[:64], scales[:2], out, scratch=scratch)
    encode_blocks(values, codes.clone(), scales.clone(), scratch=scratch)
    again = torch.zeros(64, dtype=dtype), torch.zeros(2, dtype=torch.bfloat16)
    encode_blocks(values[:64], *again, scratch=scratch)
    assert torch.equal(again[0], codes[:64])
    assert torch.equal(again[1], scales[:2])
