"""Live parameters of a block: joined end to end, made into masters, and written back."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from offload.device.boundary import is_on_device
from offload.format.arrays import MASTER, MASTER_LOW
from offload.update.coding import codecs
from offload.update.pool import BlockContext


def split_back(joined: torch.Tensor, views: list[torch.Tensor]) -> None:
    """Copy a flat tensor that `join` has returned back into the views it was made from."""
    sizes = [view.numel() for view in views]
    if any(view.is_neg() for view in views):  # torch's list operation does not take them
        for view, part in zip(views, torch.split(joined, sizes), strict=True):
            view.copy_(part)
    else:
        torch.split_with_sizes_copy(joined, sizes, out=views)


def join(
    context: BlockContext,
    name: str,
    views: list[torch.Tensor],
    dtype: torch.dtype,
    *,
    distinct: bool = False,
) -> torch.Tensor:
    """Return flat views end to end: in a buffer, or the view itself if there is only one.

    Args:
        context: Memory of the calling thread.
        name: Name of the buffer.
        views: Flat views of a block's pieces.
        dtype: Dtype of the result.
        distinct: Whether each element of the result must have its own memory.
    """
    if len(views) == 1:
        (view,) = views
        # An expanded gradient is copied: torch's foreach code changes gradients in place.
        expanded = distinct and view.stride(0) == 0
        if view.dtype == dtype and not expanded:
            return view
    out = context.buffer(name, dtype, sum([view.numel() for view in views]))
    return torch.cat(views, out=out)


def master_of(
    context: BlockContext,
    live: torch.Tensor,
    stored: Mapping[str, torch.Tensor],
    *,
    is_new: bool,
) -> torch.Tensor:
    """Return the FP32 parameter of a block, to be stepped in place."""
    if MASTER_LOW in stored:
        master = context.buffer(MASTER, torch.float32, len(live))
        if is_new:
            return master.copy_(live)
        codecs.join_master(live, stored[MASTER_LOW], master, scratch=context.scratch)
        return master
    if MASTER not in stored:
        return live  # an FP32 parameter is its own master
    master = stored[MASTER]
    if is_new:
        return master.copy_(live)
    rounded = context.buffer("rounded", live.dtype, len(live)).copy_(master)
    take_edits(master, live, rounded)
    return master


def take_edits(master: torch.Tensor, live: torch.Tensor, rounded: torch.Tensor) -> None:
    """Replace the values of a master whose live parameter has been edited since the last step."""
    # Bits are compared: NaN equals itself, and 0.0 differs from -0.0. If the alignment allows it,
    # eight bytes are compared at a time, which takes a third of the time of a cast.
    if is_on_device(master):  # torch.equal would wait for the device
        edited = rounded.view(torch.int16) != live.view(torch.int16)
        master.copy_(torch.where(edited, live.float(), master))
        return
    wide = len(live) % 4 == 0 and live.data_ptr() % 8 == 0 and live.storage_offset() % 4 == 0
    bits = torch.int64 if wide else torch.int16
    if not torch.equal(rounded.view(bits), live.view(bits)):
        edited = rounded.view(torch.int16) != live.view(torch.int16)
        master.copy_(torch.where(edited, live.float(), master))
