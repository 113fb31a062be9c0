"""Geometry of boxes in flat ranges of elements, and in the tensors that they are parts of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from offload.format.boxes import Box


def hull(box: Box, part: Box) -> tuple[int, int]:
    """Return the flat range from the first to the last element of a part of a box.

    Args:
        box: The box, whose elements are counted in row-major order.
        part: A box within it that has elements.

    Returns:
        The first element, and one past the last.
    """
    first = last = 0
    for offset, size, start, stop in zip(
        box.offsets, box.sizes, part.offsets, part.stops, strict=True
    ):
        first, last = first * size + start - offset, last * size + stop - 1 - offset
    return first, last + 1


def uncovered(
    shape: Sequence[int], owners: Sequence[tuple[int, Box]]
) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """Yield the boxes of a tensor that do not have exactly one owner, with their owners.

    Args:
        shape: Shape of the tensor, without a size of 0.
        owners: Number of each owner, with a box that lies within the shape.
    """
    yield from _uncovered(tuple(shape), owners, ())


def _uncovered(
    shape: tuple[int, ...], owners: Sequence[tuple[int, Box]], taken: tuple[tuple[int, int], ...]
) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """Cut the tensor into slabs at all edges of boxes, in one dimension after another."""
    dim = len(taken)
    if len(owners) == 1 and owners[0][1].sizes[dim:] == shape[dim:]:
        return
    if dim == len(shape) or not owners:
        rest = tuple((0, n) for n in shape[dim:])
        offsets, stops = zip(*taken, *rest, strict=True) if shape else ((), ())
        sizes = tuple(stop - offset for offset, stop in zip(offsets, stops, strict=True))
        if len(owners) != 1:
            yield Box(offsets, sizes), tuple(sorted(rank for rank, _ in owners))
        return
    waiting = sorted(owners, key=lambda owner: owner[1].offsets[dim], reverse=True)
    edges = {0, shape[dim]}
    for _, box in owners:
        edges |= {box.offsets[dim], box.stops[dim]}
    active: list[tuple[int, Box]] = []
    for start, stop in pairwise(sorted(edges)):
        active = [owner for owner in active if owner[1].stops[dim] > start]
        while waiting and waiting[-1][1].offsets[dim] <= start:
            active.append(waiting.pop())
        yield from _uncovered(shape, active, (*taken, (start, stop)))
