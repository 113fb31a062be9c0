"""8-bit moments: one byte per element, and one bfloat16 scale per 32 of them.

The companded block formats of "FlashOptim: Optimizers for Memory Efficient Training" (Databricks,
the flashoptim repository), with two differences: scales are bfloat16, because second moments are
often below 6e-8, where FP16 has little or nothing; and a second moment that is not zero never
decodes to zero. As in `offload.codecs`, everything is correctly rounded element by element, and the
largest of 32 is exact: the bytes do not depend on threads, nor on where a tensor is cut, if cuts
are multiples of 32 from its start.
"""

from __future__ import annotations

import math

import torch

from offload.codecs import Scratch

BLOCK = 32
"""Elements that share a scale; the last block of a tensor may be shorter."""

TOO_LARGE = 2.0**120
"""A signed moment of this magnitude is treated like an infinity: 254 times it may be one."""

_SMALLEST = 2.0**-149


def num_blocks(num_elements: int) -> int:
    """Return the number of scales of that many elements."""
    return -(-num_elements // BLOCK)


def encode_blocks(
    values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, *, scratch: Scratch
) -> None:
    """Encode FP32 moments.

    - int8, for signed moments: the scale s is the block's largest magnitude, rounded up to
      bfloat16, and the code 127 f(v / s) to the nearest integer, where f(x) = 2x / (1 + |x|).
    - uint8, for second moments: s is the largest square root, rounded up, and the code
      255 sqrt(v) / s to the nearest integer, but 1 where that would make 0 of a v > 0. A second
      moment of zero under a first moment that is not would make a huge update; one that is too
      large makes a small one.

    Zeros stay zeros. A block with a NaN, an infinity, a magnitude of `TOO_LARGE` (int8) or a
    negative value (uint8) gets a NaN for a scale, and decodes to NaN. Signed values below 2e-3 of
    their block's largest, and those of a block that has nothing above 2e-41, may become zeros.

    Args:
        values: FP32, shape (n,); unchanged.
        codes: int8 or uint8, which chooses; shape (n,); overwritten.
        scales: bfloat16, shape (`num_blocks` (n),); overwritten.
        scratch: To work in.
    """
    encode = _encode_signed if codes.dtype == torch.int8 else _encode_unsigned
    for rows, cut, row_cut in _rows(values.numel()):
        encode(values[cut].view(rows), codes[cut].view(rows), scales[row_cut], scratch)


def decode_blocks(
    codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, *, scratch: Scratch
) -> None:
    """Decode what `encode_blocks` wrote.

    Greater codes decode to greater values, the greatest to the scale (uint8: to its square). A
    uint8 code that is not 0 decodes to a value that is not, where the square of the scale is a
    normal FP32 number (1.2e-38 or more).

    Encoding the result again gives the same bytes for int8, if the scale is a normal number. For
    uint8 it does where a block has the code 255; elsewhere the scale may go down to the next
    bfloat16 once, and codes change with it, values by less than they did in the first encoding.

    Args:
        codes: int8 or uint8, which chooses; shape (n,).
        scales: bfloat16, shape (`num_blocks` (n),).
        out: FP32, shape (n,); overwritten.
        scratch: To work in.
    """
    decode = _decode_signed if codes.dtype == torch.int8 else _decode_unsigned
    for rows, cut, row_cut in _rows(codes.numel()):
        decode(codes[cut].view(rows), scales[row_cut], out[cut].view(rows), scratch)


def _rows(num_elements: int) -> list[tuple[tuple[int, int], slice, slice]]:
    """Return shape, elements and scales of the whole blocks, and of the short one after them."""
    num_whole, rest = divmod(num_elements, BLOCK)
    whole = ((num_whole, BLOCK), slice(num_whole * BLOCK), slice(num_whole))
    short = ((1, rest), slice(num_whole * BLOCK, None), slice(num_whole, None))
    return [whole] * bool(num_whole) + [short] * bool(rest)


def _encode_signed(
    values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, scratch: Scratch
) -> None:
    num = values.numel()
    work = scratch.float32("a", num).view(values.shape)
    torch.abs(values, out=work)
    # Compared as integers, in which NaN is above infinity: twice as fast as floats.
    largest = torch.amax(work.view(torch.int32), 1).view(torch.float32)
    # 127 f(v / s) = 254 v / (s + |v|). The sum rounds it, far faster than torch.round and a
    # conversion from float would; what then remains is to narrow integers to their low byte.
    work.add_(_round_scales(largest, scales))
    torch.addcdiv(scratch.rounders(num).view(values.shape), values, work, value=254, out=work)
    codes.copy_(work.view(torch.int32))


def _encode_unsigned(
    values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, scratch: Scratch
) -> None:
    num = values.numel()
    roots = scratch.float32("a", num).view(values.shape)
    work = scratch.float32("b", num).view(values.shape)
    torch.sqrt(values, out=roots)
    # Compared as floats: the NaN that is the root of a negative value may be a negative integer.
    divisors = _round_scales(torch.amax(roots, 1), scales)
    torch.addcdiv(scratch.rounders(num).view(values.shape), roots, divisors, value=255, out=work)
    codes.copy_(work.view(torch.int32))
    if not codes.amin():
        # 0 for zeros, 1 for what is larger: positive floats are ordered as integers are.
        present = scratch.bytes("b", num).view(values.shape)
        present.copy_(roots.view(torch.int32).clamp_max_(1))
        torch.maximum(codes, present, out=codes)


def _round_scales(largest: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Round up to bfloat16 in `scales`; return them as a column to divide by, without zeros."""
    if not largest.amax().item() < TOO_LARGE:
        largest = torch.where(largest < TOO_LARGE, largest, math.nan)
    bits = largest.view(torch.int32)
    scales.view(torch.int16).copy_(bits.add_(0xFFFF).bitwise_right_shift_(16))
    return largest.copy_(scales).clamp_min_(_SMALLEST).unsqueeze(1)


def _decode_signed(
    codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, scratch: Scratch
) -> None:
    # The inverse of f, times s: s c / (254 - |c|).
    magnitudes = scratch.bytes("b", codes.numel()).view(codes.shape)
    torch.abs(codes, out=magnitudes.view(torch.int8))
    magnitudes.neg_().add_(254)  # modulo 256
    divisors = scratch.float32("a", codes.numel()).view(codes.shape)
    divisors.copy_(magnitudes)
    out.copy_(codes).div_(divisors).mul_(scales.float().unsqueeze(1))


def _decode_unsigned(
    codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, scratch: Scratch
) -> None:
    # Divided first, so that 255 decodes to exactly the square of the scale.
    out.copy_(codes).div_(255).mul_(scales.float().unsqueeze(1))
    torch.mul(out, out, out=out)
