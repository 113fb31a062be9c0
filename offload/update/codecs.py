"""Smaller encodings of the state: split masters, and 16-bit moments.

Pure functions on flat, contiguous CPU tensors, meant for blocks that are in cache. Every operation
is exact or correctly rounded, element by element, so the bytes depend neither on threads nor on
where a tensor is cut.

Split masters are those of "FlashOptim: Optimizers for Memory Efficient Training" (Databricks, the
flashoptim repository) with a 16-bit remainder. The 8-bit formats of `offload.update.blocks8` and
the stochastic rounding of `offload.update.rounding` are had from here, too.
"""

from __future__ import annotations

import torch

from offload.update.blocks8 import decode_blocks, encode_blocks
from offload.update.rounding import has_nan, round_runs, round_stochastic, without_odd_nans
from offload.update.scratch import Scratch, constant

__all__ = [
    "Scratch",
    "decode_blocks",
    "encode_blocks",
    "join_master",
    "round_runs",
    "round_stochastic",
    "split_master",
]


_HALF, _SIXTEEN = constant(0x8000), constant(16)


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
    bits = without_odd_nans(master).view(torch.int32)
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
    if has_nan(out):
        out.copy_(torch.where(out.isnan(), live.float(), out))
