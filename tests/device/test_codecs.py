"""8-bit codecs of the kernels: the bytes of `coding.blocks8`, for all codes and all scales.

The device source is compiled for the CPU. Instructions that a device has approximations for are
wrong there by as much as CUDA's documentation allows: upwards, downwards, and now this, now that.
"""

from __future__ import annotations

import ctypes
from functools import cache

import numpy as np
import pytest
import torch

from offload.device.kernels.loading import text
from offload.update.coding import blocks8
from offload.update.scratch import Scratch
from tests.campaigns import FULL
from tests.device.host import SHIM, build

_ENTRY = """
extern "C" void decode(const u32 *codes, const u16 *scales, u64 num_blocks, int is_signed,
                       float *values) {
  float quotients[256];
  for (u32 code = 0; code < 256; code++) quotients[code] = signed_quotient(code);
  for (u64 quad = 0; quad < 8 * num_blocks; quad++)
    if (is_signed)
      decode_signed(codes[quad], scales[quad / 8], quotients, values + 4 * quad);
    else
      decode_unsigned(codes[quad], scales[quad / 8], values + 4 * quad);
}
extern "C" void encode(const float *values, u64 num_blocks, int is_signed, u32 *codes,
                       u16 *scales) {
  for (u64 block = 0; block < num_blocks; block++) {
    u32 largest = 0;
    for (u64 i = 32 * block; i < 32 * block + 32; i++) {
      const u32 size = is_signed ? size_signed(values[i]) : size_unsigned(values[i]);
      if (size > largest) largest = size;
    }
    const u16 scale = is_signed ? scale_signed(largest) : scale_unsigned(largest);
    scales[block] = scale;
    for (u64 quad = 8 * block; quad < 8 * block + 8; quad++)
      codes[quad] = is_signed ? encode_signed(values + 4 * quad, largest, scale)
                              : encode_unsigned(values + 4 * quad, largest, scale);
  }
}
extern "C" void scales_of(const u32 *largest, u64 num, u16 *scales) {
  for (u64 i = 0; i < num; i++) scales[i] = scale_unsigned(largest[i]);
}
extern "C" void halves_of(const u32 *bits, u64 num, u32 *halves) {
  for (u64 i = 0; i < num; i++) {
    const float value = __uint_as_float(bits[i]);
    halves[i] = to_bfloat16s(value, value);
  }
}
"""

ERRORS = {"below": ["-DAPPROXIMATE=-1"], "above": ["-DAPPROXIMATE=1"], "mixed": []}
DTYPES = {"signed": torch.int8, "unsigned": torch.uint8}
BOTH = pytest.mark.parametrize("kind", DTYPES)
ONE_IN = 1 if FULL else 37
"""How many scales there are to each that is tried where there are many values for each."""


@pytest.fixture(scope="session")
def library(libraries):
    @cache
    def built(errors: str) -> ctypes.CDLL:
        source = SHIM.read_text() + text("values.cuh") + _ENTRY
        return build(source, libraries, options=["-O2", *ERRORS[errors]])

    return built


def pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def both_encode(library, values: torch.Tensor, kind: str) -> None:
    """Encode whole blocks by both, and compare all bytes."""
    num = len(values) // 32
    codes = torch.empty(len(values), dtype=DTYPES[kind])
    scales = torch.empty(num, dtype=torch.bfloat16)
    library.encode(
        pointer(values), ctypes.c_uint64(num), kind == "signed", pointer(codes), pointer(scales)
    )
    expected = torch.empty_like(codes), torch.empty_like(scales)
    blocks8.encode_blocks(values, *expected, scratch=Scratch())
    assert torch.equal(scales.view(torch.int16), expected[1].view(torch.int16))
    wrong = (codes != expected[0]).nonzero()
    assert not len(wrong), (len(wrong), values[wrong[0]], codes[wrong[0]], expected[0][wrong[0]])


@BOTH
def test_all_codes_of_all_scales_decode_to_the_same_bits(kind, library):
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    scales = every.view(torch.bfloat16).repeat_interleave(8)
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).repeat(1 << 16)
    codes = codes.view(DTYPES[kind])
    found, expected = torch.empty(len(codes)), torch.empty(len(codes))
    library("mixed").decode(
        pointer(codes),
        pointer(scales),
        ctypes.c_uint64(len(scales)),
        kind == "signed",
        pointer(found),
    )
    blocks8.decode_blocks(codes, scales, expected, scratch=Scratch())
    same = found.view(torch.int32) == expected.view(torch.int32)
    assert bool((same | (found.isnan() & expected.isnan())).all())


@pytest.mark.parametrize("errors", ERRORS)
@BOTH
def test_all_codes_of_all_scales_are_encoded_again_to_the_same_bytes(kind, errors, library):
    every = torch.arange(0, 0x7F80, dtype=torch.int32).to(torch.int16)  # not negative, finite
    scales = every.view(torch.bfloat16).repeat_interleave(8)
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).repeat(0x7F80).view(DTYPES[kind])
    values = torch.empty(len(codes))
    blocks8.decode_blocks(codes, scales, values, scratch=Scratch())
    both_encode(library(errors), values, kind)


@pytest.mark.parametrize("errors", ERRORS)
@BOTH
def test_values_between_two_codes_are_rounded_to_the_same_one(kind, errors, library):
    """Those next to every half, by units in the last place, beside the largest value of a block."""
    halves = np.arange(127 if kind == "signed" else 255) + 0.5
    every = np.arange(1, 0x7F80, dtype=np.uint32)
    scales = (every << 16).view(np.float32)
    if kind == "signed":
        scales = scales[scales < 2.0**120]
        ratios = halves / (254 - halves)  # of 254 x / (1 + x)
        largest = scales
    else:
        scales = scales[(scales > 2.0**-74) & (scales < 2.0**63.9)]
        ratios = (halves / 255) ** 2
        with np.errstate(under="ignore"):
            largest = scales * scales
    for some in np.array_split(np.arange(len(scales))[::ONE_IN], 24 if FULL else 1):
        factor = scales[some].astype(np.float64)
        at = np.outer(factor if kind == "signed" else factor**2, ratios).astype(np.float32)
        steps = np.arange(-6, 7, dtype=np.int32)
        near = (at.view(np.int32)[:, :, None] + steps).clip(0).view(np.float32)
        if kind == "signed":
            near[:, ::2] *= -1
        near = near.reshape(len(some), -1)
        near = np.pad(near, ((0, 0), (0, -near.shape[1] % 31)))
        blocks = near.reshape(len(some), -1, 31)
        top = np.broadcast_to(largest[some][:, None, None], (*blocks.shape[:2], 1))
        values = np.concatenate([top, blocks], axis=2).reshape(-1).astype(np.float32)
        both_encode(library(errors), torch.from_numpy(values), kind)


@pytest.mark.parametrize("errors", ERRORS)
def test_scales_of_all_second_moments_of_two_binades_are_the_same(errors, library):
    """A root scales with its argument's power of 4, so that two binades stand for all numbers."""
    first = int(np.float32(1.0).view(np.int32))
    ranges = [torch.arange(first, first + (2 << 23), 1 if FULL else 5, dtype=torch.int32)]
    # the bits of all other numbers, sampled: denormal, huge, infinite; and NaN
    ranges.append(torch.arange(0, 0x7F800000, 509, dtype=torch.int32))
    ranges.append(torch.arange(0, 3000, dtype=torch.int32))
    ranges.append(torch.tensor([0x7F7FFFFF, 0x7F800000, 0x7FC00000], dtype=torch.int32))
    for largest in ranges:
        found = torch.empty(len(largest), dtype=torch.int16)
        library(errors).scales_of(pointer(largest), ctypes.c_uint64(len(largest)), pointer(found))
        values = largest.view(torch.float32).clone()
        codes = torch.empty((len(values), 1), dtype=torch.uint8)
        scales = torch.empty(len(values), dtype=torch.bfloat16)
        blocks8._encode_unsigned(values[:, None], codes, scales, (len(values), 1), Scratch())
        assert torch.equal(found, scales.view(torch.int16))
