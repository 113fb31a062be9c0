"""8-bit moments: one byte per element, and one bfloat16 scale per block of 32.

These are the companded formats of "FlashOptim: Optimizers for Memory Efficient Training"
(Databricks), but scales are bfloat16, because second moments are often far below the range of FP16,
and a nonzero second moment never becomes zero. The bytes depend neither on threads nor on where a
tensor is cut, if cuts are multiples of 32 from its start.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import torch

from offload.format.arrays import BLOCK_ELEMENTS
from offload.update.scratch import Scratch, constant

TOO_LARGE = 2.0**120
"""Magnitude from which a signed moment is treated like an infinity: 254 times this may overflow."""

_NAN_BITS = 0x7FC0
_SCALE_ROUND_UP = constant(0x7FFD)
_DOUBLE_LARGEST_CODE = constant(254, torch.uint8)
_ONE_255TH = constant(1 / 255, torch.float32)  # 255 times this is exactly 1.0
_ONE = constant(1)
_ONE_BYTE = constant(1, torch.uint8)
_TINY = constant(2.0**-149, torch.float32)
_TINY_ROOT = constant(2.0**-100, torch.float32)


def encode_blocks(
    values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, *, scratch: Scratch
) -> None:
    """Encode FP32 moments.

    - int8 is for signed moments. The scale s is the block's largest magnitude, rounded up to
      bfloat16. The code is 127 f(v / s), rounded to the nearest integer, where
      f(x) = 2x / (1 + |x|).
    - uint8 is for second moments. The scale s is the largest square root, rounded up. The code is
      255 sqrt(v) / s, rounded to the nearest integer, but 1 if a v > 0 would become 0. A second
      moment of zero beside a nonzero first moment would make a huge update. A second moment that
      is too large makes a small update.

    Zeros stay zeros. A block with a NaN, an infinity, a magnitude of `TOO_LARGE` or more (int8) or
    a negative value (uint8) gets a NaN as its scale, and decodes to NaN; all its codes are 0.
    Signed values below 1/500 of their block's largest magnitude, or below 2e-43, may become zeros.
    Second moments above 3.37e38 may become infinite.
    """
    encode = _encode_signed if codes.dtype == torch.int8 else _encode_unsigned
    for shape, (v, c, s) in _rows(values, codes, scales):
        encode(v, c, s, shape, scratch)


def decode_blocks(
    codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, *, scratch: Scratch
) -> None:
    """Decode the result of `encode_blocks`.

    Greater codes decode to greater values, and the greatest code decodes to the scale (int8) or to
    its square (uint8). A nonzero uint8 code decodes to a nonzero value if the square of the scale
    is a normal FP32 number (1.2e-38 or more).

    Encoding an int8 result again gives the same bytes if the scale is a normal number. Encoding a
    uint8 result again gives the same bytes if the block has the code 255. Otherwise the scale may
    decrease to the next bfloat16, once, and the codes change with it.
    """
    decode = _decode_signed if codes.dtype == torch.int8 else _decode_unsigned
    for shape, (v, c, s) in _rows(out, codes, scales):
        decode(c, s.float().unsqueeze_(1), v, shape, scratch)


def decode_elements(
    codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, *, scratch: Scratch
) -> None:
    """Decode codes that each have a scale of their own, as `decode_blocks` does."""
    shape = (1, codes.numel())
    decode = _decode_signed if codes.dtype == torch.int8 else _decode_unsigned
    decode(codes.view(shape), scales.float().view(shape), out.view(shape), shape, scratch)


_Shape = tuple[int, int]
_Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _rows(
    values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
) -> Iterator[tuple[_Shape, _Rows]]:
    """Yield whole blocks as rows, with their scales, and then the short block at the end."""
    num_whole, rest = divmod(values.numel(), BLOCK_ELEMENTS)
    end = values.numel() - rest
    if num_whole:
        shape = (num_whole, BLOCK_ELEMENTS)
        if rest:
            yield shape, (values[:end].view(shape), codes[:end].view(shape), scales[:num_whole])
        else:
            yield shape, (values.view(shape), codes.view(shape), scales)
    if rest:
        shape = (1, rest)
        yield shape, (values[end:].view(shape), codes[end:].view(shape), scales[num_whole:])


def _encode_signed(
    values: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    shape: _Shape,
    scratch: Scratch,
) -> None:
    work = scratch.view("a", torch.float32, shape)
    bits = scratch.view("a", torch.int32, shape)
    torch.abs(values, out=work)
    # 127 f(v / s) = 254 v / (s + |v|). Adding the rounder and keeping low bytes is far faster than
    # torch.round and a conversion from float.
    rounded, has_nan = _round_scales(_largest(bits), scales)
    work.add_(rounded.clamp_min_(_TINY))  # avoids 0 / 0
    torch.addcdiv(scratch.rounders(shape), values, work, value=254, out=work)
    codes.copy_(bits)
    if has_nan:
        _clear_codes(codes, scales)


def _decode_signed(
    codes: torch.Tensor,
    scales: torch.Tensor,
    out: torch.Tensor,
    shape: _Shape,
    scratch: Scratch,
) -> None:
    # The inverse of f, times s, is s c / (254 - |c|).
    divisors = scratch.view("a", torch.float32, shape)
    small = scratch.view("b", torch.uint8, shape)
    torch.abs(codes, out=scratch.view("b", torch.int8, shape))
    torch.sub(_DOUBLE_LARGEST_CODE, small, out=small)
    divisors.copy_(small)
    out.copy_(codes).div_(divisors).mul_(scales)


def _encode_unsigned(
    values: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    shape: _Shape,
    scratch: Scratch,
) -> None:
    # Positive floats have the order of their bits as integers. Floats with a sign bit are below.
    value_bits = values.view(torch.int32)
    smallest = value_bits.amin().item()
    if smallest < 0:
        values = torch.where(values >= 0, values.abs(), math.nan)
        value_bits, smallest = values.view(torch.int32), 0
    work = scratch.view("a", torch.float32, shape)
    bits = scratch.view("a", torch.int32, shape)
    largest = _largest(value_bits).rsqrt_().reciprocal_()
    # 1 / sqrt(v): torch's sqrt is slow, very slow for zeros, and not correctly rounded everywhere.
    torch.rsqrt(values, out=work)
    rounded, has_nan = _round_scales(largest, scales)
    factors = rounded.clamp_min_(_TINY_ROOT).reciprocal_()  # avoids inf / inf
    torch.addcdiv(scratch.rounders(shape), factors, work, value=255, out=work)
    codes.copy_(bits)
    if smallest > 0:
        codes.clamp_min_(_ONE_BYTE)
    else:
        present = scratch.view("b", torch.uint8, shape)
        torch.minimum(value_bits, _ONE, out=bits)
        present.copy_(bits)
        torch.maximum(codes, present, out=codes)
    if has_nan:
        _clear_codes(codes, scales)


def _decode_unsigned(
    codes: torch.Tensor,
    scales: torch.Tensor,
    out: torch.Tensor,
    shape: _Shape,  # noqa: ARG001
    scratch: Scratch,  # noqa: ARG001
) -> None:
    # Multiplied by 1/255 first, so that 255 decodes to exactly the square of the scale.
    out.copy_(codes).mul_(_ONE_255TH).mul_(scales)
    torch.mul(out, out, out=out)


def _largest(bits: torch.Tensor) -> torch.Tensor:
    """Return the largest value of each row of bits without sign; NaN is larger than infinity."""
    return torch.amax(bits, 1).view(torch.float32)


def _clear_codes(codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Set codes of blocks whose scale is NaN to 0: they would depend on the width of vectors."""
    codes.masked_fill_(scales.isnan().unsqueeze_(1), 0)


def _round_scales(largest: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """Round the largest values up to bfloat16, into `scales`.

    A value up to 3 units of FP32 above a bfloat16 is rounded down to it. Three roundings may have
    made a root too large by this much. It must still get the scale that it was decoded with.
    """
    has_nan = not largest.amax().item() < TOO_LARGE
    if has_nan:
        largest = torch.where(largest < TOO_LARGE, largest, math.nan)
    # Half a unit of bfloat16, minus 3 units of FP32. torch then rounds the sum to nearest.
    largest.view(torch.int32).add_(_SCALE_ROUND_UP)
    scales.copy_(largest)
    if has_nan:  # always the same NaN: torch's vector and scalar code produce different ones
        scales.view(torch.int16).masked_fill_(scales.isnan(), _NAN_BITS)
    return largest.copy_(scales).unsqueeze_(1), has_nan


Values: TypeAlias = "np.ndarray[Any, Any]"


class BlockRecoder:
    """Decodes 8-bit values to FP32, and encodes them in new blocks as a step does."""

    def __init__(self) -> None:
        self._scratch = Scratch()

    def __call__(self, codes: Values, scales: Values) -> tuple[Values, Values]:
        """Encode values anew, in blocks that begin at the first of them."""
        scale_bits = torch.from_numpy(scales.view(np.int16))
        old = torch.from_numpy(codes)
        values = torch.empty(len(codes), dtype=torch.float32, device="cpu")
        decode_elements(old, scale_bits.view(torch.bfloat16), values, scratch=self._scratch)
        new = torch.empty_like(old)
        num_blocks = -(-len(codes) // BLOCK_ELEMENTS)
        found = torch.empty(num_blocks, dtype=torch.bfloat16, device="cpu")
        encode_blocks(values, new, found, scratch=self._scratch)
        return new.numpy(), found.view(torch.int16).numpy().view(np.uint16)
