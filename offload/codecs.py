"""Smaller encodings of the state: split masters, and 16-bit moments.

Pure functions on flat, contiguous CPU tensors, meant for blocks that are in cache. Every operation
is exact or correctly rounded, element by element, so the bytes depend neither on threads nor on
where a tensor is cut.

Split masters are those of "FlashOptim: Optimizers for Memory Efficient Training" (Databricks, the
flashoptim repository) with a 16-bit remainder. Stochastic rounding is that of Zamirai et al.,
"Revisiting BFloat16 Training" (2020). The 8-bit formats, of `offload.blocks8`, are had from here.
"""

from __future__ import annotations

import hashlib
import math

import torch

from offload.blocks8 import decode_blocks, encode_blocks
from offload.scratch import Scratch, constant

__all__ = [
    "Scratch",
    "decode_blocks",
    "encode_blocks",
    "join_master",
    "round_stochastic",
    "split_master",
]


def _wrapped(value: int) -> int:
    """Return the signed 32-bit number with the same low bits."""
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)


_HALF, _FIFTEEN, _SIXTEEN = constant(0x8000), constant(15), constant(16)
_LOW_16, _LOW_17 = constant((1 << 16) - 1), constant((1 << 17) - 1)
_GOLDEN_RATIO = _wrapped(0x9E3779B9)
_MULTIPLIER = constant(_wrapped(0x846CA68B))


def split_master(
    master: torch.Tensor, live: torch.Tensor, low: torch.Tensor, *, scratch: Scratch
) -> None:
    """Split FP32 masters into the bfloat16 parameters and the 16 bits that those lack.

    The parameter is the master rounded to nearest, ties away from zero (plain torch rounds ties to
    even), which is what makes the remainder fit into a signed 16-bit number. Every finite value,
    infinity and zero is recovered exactly by `join_master`, also those so large that the parameter
    is infinite. A NaN becomes the quiet NaN of its sign: others could round to a number.

    Args:
        master: FP32, shape (n,); unchanged.
        live: bfloat16, shape (n,); overwritten.
        low: int16, shape (n,); overwritten.
        scratch: To work in.
    """
    if not master.numel():
        return
    bits = _without_odd_nans(master).view(torch.int32)
    rounded = scratch.view("a", torch.int32, bits.shape)
    torch.add(bits, _HALF, out=rounded)
    live.view(torch.int16).copy_(rounded.bitwise_right_shift_(_SIXTEEN))
    low.copy_(bits)


def join_master(
    live: torch.Tensor, low: torch.Tensor, out: torch.Tensor, *, scratch: Scratch
) -> None:
    """Make FP32 masters from bfloat16 parameters and what `split_master` left of them.

    A parameter that somebody has edited since then becomes a master that rounds to the edited
    value, with remainder bits of the value before: at most half a unit in the last place away.
    Where there is no such master, because the edited value is zero and the remainder negative, or
    infinite and positive, it is the edited value itself. (A finite value edited to an infinity,
    with a negative remainder, becomes a finite master that rounds to the infinity: that is how the
    largest finite masters look.)

    Args:
        live: bfloat16, shape (n,).
        low: int16, shape (n,).
        out: FP32, shape (n,); overwritten.
        scratch: To work in.
    """
    if not out.numel():
        return
    remainder = scratch.view("a", torch.int32, out.shape)
    remainder.copy_(low)  # extends the sign
    out.copy_(live)
    out.view(torch.int32).add_(remainder)
    if _has_nan(out):
        out.copy_(torch.where(out.isnan(), live.float(), out))


def round_stochastic(
    values: torch.Tensor,
    out: torch.Tensor,
    *,
    seed: int,
    stream: int,
    step: int,
    first_element: int,
    scratch: Scratch,
) -> None:
    """Round FP32 to bfloat16, up or down at random, so that the expected result is the value.

    What an element gets depends on the four numbers and its own index only, never on how a tensor
    is cut into calls. Values that bfloat16 holds exactly do not change, nor do infinities; a NaN
    becomes the quiet NaN of its sign. Values beyond the largest finite bfloat16 (3.39e38) become
    that or infinite, as if it were the next number.

    Args:
        values: FP32, shape (n,); unchanged.
        out: bfloat16, shape (n,); overwritten.
        seed: Any integer.
        stream: Any integer; tells arrays apart that share a seed.
        step: Any integer.
        first_element: Index of ``values[0]``; 64 bits.
        scratch: To work in.
    """
    done = 0
    while done < values.numel():
        # One 32-bit hash serves two elements, and one key 2**32 hashes.
        element = first_element + done
        hashes, pair = divmod(element >> 1, 1 << 32)
        num = min(values.numel() - done, (((hashes + 1) << 33) - element))
        key = hashlib.blake2b(f"{seed},{stream},{step},{hashes}".encode(), digest_size=8).digest()
        num_pairs = ((element & 1) + num + 1) >> 1
        random = _hash(pair, num_pairs, key, scratch).view(torch.uint16)[element & 1 :][:num]

        bits = _without_odd_nans(values[done : done + num]).view(torch.int32)
        sums = scratch.view("a", torch.int32, (num,))
        sums.copy_(random)
        sums.add_(bits).bitwise_right_shift_(_SIXTEEN)
        out[done : done + num].view(torch.int16).copy_(sums)
        done += num


def _hash(first: int, num: int, key: bytes, scratch: Scratch) -> torch.Tensor:
    """Return 32 random bits for each of `num` indexes, as int32.

    This is lowbias32 (C. Wellons, hash-prospector) of a Weyl sequence: indexes times the golden
    ratio. Of plain indexes it gives numbers whose differences are far from uniform. Half of the key
    is added before, half inside, lest two keys give the same numbers in another order.
    """
    before, inside = (int.from_bytes(key[i : i + 4], "little", signed=True) for i in (0, 4))
    x, shifted = (scratch.view(name, torch.int32, (num,)) for name in "ba")

    def xor_shift(bits: torch.Tensor, mask: torch.Tensor) -> None:
        # int32 shifts copy the sign; torch has no shifts of uint32
        torch.bitwise_right_shift(x, bits, out=shifted)
        x.bitwise_xor_(shifted.bitwise_and_(mask))

    start = constant(_wrapped(first * _GOLDEN_RATIO + before))
    torch.add(start, scratch.counter(num), alpha=_GOLDEN_RATIO, out=x)
    xor_shift(_SIXTEEN, _LOW_16)
    torch.add(constant(inside), x, alpha=0x7FEB352D, out=x)
    xor_shift(_FIFTEEN, _LOW_17)
    x.mul_(_MULTIPLIER)
    xor_shift(_SIXTEEN, _LOW_16)
    return x


def _without_odd_nans(values: torch.Tensor) -> torch.Tensor:
    """Return FP32 values in which a NaN is the quiet one of its sign: a copy only if needed."""
    if not _has_nan(values):
        return values
    bits = values.view(torch.int32)
    quiet = (bits & -(1 << 31)) | 0x7FC00000
    return torch.where(values.isnan(), quiet, bits).view(torch.float32)


def _has_nan(values: torch.Tensor) -> bool:
    # The maximum is NaN if anything is: one pass, and nothing to write.
    return math.isnan(values.amax().item())
