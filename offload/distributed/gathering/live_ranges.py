"""Views of a part of a tensor: a range of elements whatever its strides, and a rank's own box."""

from __future__ import annotations

import torch

from offload.format.boxes import Box
from offload.model.shards import is_dtensor


def range_views(tensor: torch.Tensor, start: int, stop: int) -> list[torch.Tensor]:
    """Return views that, one after the other in row-major order, are a range of elements.

    A contiguous tensor gives one flat view. Another tensor gives at most two views for each
    dimension and one more, none of which needs a copy of the tensor.
    """
    if start >= stop:
        return []
    if tensor.is_contiguous():
        return [tensor.view(-1)[start:stop]]
    if (start, stop) == (0, tensor.numel()):
        return [tensor]
    row = tensor[0].numel()  # a tensor that is not contiguous has a dimension, and elements
    first, last = -(-start // row), stop // row
    if first > last:  # the range lies within one row
        return range_views(tensor[last], start - last * row, stop - last * row)
    views: list[torch.Tensor] = []
    if start < first * row:
        views += range_views(tensor[first - 1], start - (first - 1) * row, row)
    if first < last:
        views.append(tensor[first:last])
    if last * row < stop:
        views += range_views(tensor[last], 0, stop - last * row)
    return views


def part_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """Return this rank's live memory of a box, with the version counter of its tensor."""
    if is_dtensor(tensor):
        memory: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
        return memory.detach()
    return tensor.detach()[box.slices]
