"""Compact encodings of the state: split masters, and re-exports of the other codecs.

The codecs are pure functions on flat, contiguous CPU tensors, meant for blocks that are in cache.
Every operation is exact or correctly rounded, element by element. The bytes therefore depend
neither on threads nor on where a tensor is cut.

Split masters are those of "FlashOptim: Optimizers for Memory Efficient Training" (Databricks, the
flashoptim repository) with a 16-bit remainder. This module also exports the 8-bit formats of
`offload.update.coding.blocks8` and the stochastic rounding of `offload.update.coding.rounding`.
"""

from __future__ import annotations

import torch

from offload.update.coding.blocks8 import decode_blocks, encode_blocks
from offload.update.coding.rounding import has_nan, round_runs, round_stochastic, with_quiet_nans
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
    """Split FP32 masters into bfloat16 parameters and 16-bit remainders.

    The parameter is the master rounded to nearest, ties away from zero (plain torch rounds ties to
    even). Because of this rounding the remainder fits into a signed 16-bit number. `join_master`
    recovers every finite value, infinity and zero exactly, even a value so large that its parameter
    is infinite. A NaN becomes the quiet NaN of its sign, because other NaNs could round to a
    number.

    Args:
        master: FP32, shape (n,); unchanged.
        live: bfloat16, shape (n,); overwritten with the parameters.
        low: int16, shape (n,); overwritten with the remainders.
        scratch: Working memory.
    """
    if not master.numel():
        return
    bits = with_quiet_nans(master).view(torch.int32)
    rounded = scratch.view("a", torch.int32, bits.shape)
    torch.add(bits, _HALF, out=rounded)
    live.view(torch.int16).copy_(rounded.bitwise_right_shift_(_SIXTEEN))
    low.copy_(bits)


def join_master(
    live: torch.Tensor, low: torch.Tensor, out: torch.Tensor, *, scratch: Scratch
) -> None:
    """Join bfloat16 parameters and the remainders of `split_master` into FP32 masters.

    If a parameter has been edited since the split, its master rounds to the edited value and has
    the remainder bits of the old value: it is at most half a unit in the last place away. Two kinds
    of edits have no such master: zero with a negative remainder, and an infinity with a positive
    one. Then the master is the edited value itself. (A finite value that is edited to an infinity,
    with a negative remainder, becomes a finite master that rounds to the infinity. The largest
    finite masters are stored in this way.)
    """
    if not out.numel():
        return
    remainder = scratch.view("a", torch.int32, out.shape)
    remainder.copy_(low)  # extends the sign to 32 bits
    out.copy_(live)
    out.view(torch.int32).add_(remainder)
    if has_nan(out):
        out.copy_(torch.where(out.isnan(), live.float(), out))
