"""Dealing of parameters to ranks: which box each rank steps. Pure arithmetic.

Every rank computes the same result from the same input, so that no rank has to be told.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from offload.errors import OffloadError
from offload.format.boxes import Box, Cut, first_overlap

_MOST_NAMED = 5
"""Maximal number of boxes that an error lists."""


class BoxesError(OffloadError, ValueError):
    """The boxes of a parameter overlap, do not cover it, or belong to different shapes.

    Args:
        message: Description of what is wrong, which names the parameter, the ranks and the boxes.
        name: Name of the parameter.
        ranks: Ranks that hold the boxes in question.
        boxes: The boxes in question.
    """

    def __init__(
        self, message: str, name: str, ranks: Sequence[int] = (), boxes: Sequence[Box] = ()
    ) -> None:
        super().__init__(message)
        self.name = name
        self.ranks = tuple(ranks)
        self.boxes = tuple(boxes)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (*self.args, self.name, self.ranks, self.boxes)


@dataclass(frozen=True, slots=True)
class OwnedBox:
    """A box of a parameter, with the ranks that hold it."""

    name: str

    cut: Cut
    """Shape of the parameter, and the box. The box of a whole parameter is as large as the
    shape."""

    owner: int
    """Rank that steps the box and stores its state."""

    holders: tuple[int, ...]
    """Ranks that hold the box, in ascending order; the owner is one of them."""


def deal_rows(
    shapes: Mapping[str, Sequence[int]],
    num_ranks: int,
    multiple: int = 1,
    *,
    span_elements: int | None = None,
) -> list[list[tuple[str, Cut]]]:
    """Deal parameters that every rank holds as a whole to ranks, balanced by elements.

    The parameters are laid end to end, and divided into spans of whole parameters. The elements of
    each span are cut into one contiguous range for each rank. Ranks that step their boxes in this
    order so work on the same layers at the same time. Parameters of two or more dimensions are cut
    between rows, that is along dimension 0. Vectors are cut between elements. A rank has at most
    one box of a parameter, and may have none at all. The number of elements of a rank differs from
    the average by at most one row, or by as many rows or elements as `multiple` asks for.

    Args:
        shapes: Shape of each parameter by name, in the order of the parameters.
        num_ranks: Number of ranks, at least 1.
        multiple: Number of elements that each cut is a multiple of, counted from the parameter's
            first element: 32 for int8 state and for ``fused=True``.
        span_elements: Number of elements that each span has at least, as far as there are so many;
            None for one span of all parameters.

    Returns:
        For each rank, the parameters that it steps, in order: name, shape and box.

    Raises:
        ValueError: `num_ranks`, `multiple` or `span_elements` is not positive.
    """
    if num_ranks < 1 or multiple < 1 or (span_elements is not None and span_elements < 1):
        raise ValueError(
            f"num_ranks is {num_ranks}, multiple is {multiple} and span_elements is "
            f"{span_elements}: all must be positive"
        )
    dealt: list[list[tuple[str, Cut]]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for span in _spans(shapes, span_elements):
        for rank, boxes in enumerate(_deal_span(span, loads, multiple)):
            dealt[rank] += boxes
            loads[rank] += sum(cut.box.num_elements for _, cut in boxes)
    return dealt


def _spans(
    shapes: Mapping[str, Sequence[int]], span_elements: int | None
) -> list[dict[str, Sequence[int]]]:
    """Return consecutive parameters in spans of nearly the same number of elements."""
    total = sum(math.prod(shape) for shape in shapes.values())
    num = 1 if span_elements is None else max(1, total // span_elements)
    spans: list[dict[str, Sequence[int]]] = [{}]
    done = ended = 0
    for name, shape in shapes.items():
        if done * num >= total * (ended + 1) and done < total:
            spans.append({})
            ended = done * num // total
        spans[-1][name] = shape
        done += math.prod(shape)
    return spans


def _deal_span(
    shapes: Mapping[str, Sequence[int]], loads: Sequence[int], multiple: int
) -> list[list[tuple[str, Cut]]]:
    """Deal the parameters of a span."""
    num_ranks = len(loads)
    starts = [0, *accumulate(math.prod(shape) for shape in shapes.values())]
    total, before = starts[-1], sum(loads)
    cuts = [0]
    for rank in range(1, num_ranks):
        wanted = (before + total) * rank // num_ranks - sum(loads[:rank])
        limit = min(max(wanted, cuts[-1]), total)
        cuts.append(_nearest_cut(list(shapes.values()), starts, limit, multiple))
    cuts.append(total)
    dealt: list[list[tuple[str, Cut]]] = [[] for _ in range(num_ranks)]
    for (name, given), (first, last) in zip(shapes.items(), pairwise(starts), strict=True):
        shape = tuple(given)
        rank = min(bisect_right(cuts, first), num_ranks) - 1  # ranks in front of it have ended
        if first == last:
            dealt[rank].append((name, Cut(shape, Box.whole(shape))))
        while first < last:
            stop = min(cuts[rank + 1], last)
            if first < stop:
                box = _rows(shape, first - last, stop - last)
                dealt[rank].append((name, Cut(shape, box)))
                first = stop
            rank += 1
    return dealt


def own_boxes(views: Sequence[Iterable[tuple[str, Cut]]]) -> tuple[OwnedBox, ...]:
    """Give each distinct box that ranks hold one owner, and find its other holders.

    Boxes of one parameter are either equal or have no element in common. The owners are balanced by
    elements, as far as the holders of the boxes allow it. Empty boxes of a parameter that has
    elements are ignored. A parameter without elements has one owner.

    Args:
        views: For each rank, the boxes that it holds: name, shape and box.

    Returns:
        The owned boxes, ordered by owner, then in the order in which the owner lists them.

    Raises:
        BoxesError: Boxes overlap without being equal, do not cover their parameter, or belong to
            different shapes. The error names the parameter, the ranks and the boxes.
    """
    shapes: dict[str, tuple[tuple[int, ...], int]] = {}  # shape, and the first rank that says it
    holders: dict[str, dict[Box, list[int]]] = {}
    for rank, view in enumerate(views):
        for name, cut in view:
            shape, first_rank = shapes.setdefault(name, (cut.shape, rank))
            if shape != cut.shape:
                raise BoxesError(
                    f"parameter {name!r} has the shape {list(shape)} on rank {first_rank} and "
                    f"{list(cut.shape)} on rank {rank}: construct the same model on every rank",
                    name,
                    (first_rank, rank),
                    (Box.whole(shape), Box.whole(cut.shape)),
                )
            boxes = holders.setdefault(name, {})
            box = cut.box if math.prod(shape) else Box.whole(shape)
            if box.num_elements or not math.prod(shape):
                ranks = boxes.setdefault(box, [])
                if rank not in ranks[-1:]:
                    ranks.append(rank)
    for name, boxes in holders.items():
        _require_tiling(name, shapes[name][0], boxes)
    owners = _choose_owners(holders, len(views))
    owned: list[list[OwnedBox]] = [[] for _ in views]
    for name, boxes in holders.items():
        for box, ranks in boxes.items():
            owner = owners[name, box]
            cut = Cut(shapes[name][0], box)
            owned[owner].append(OwnedBox(name, cut, owner, tuple(ranks)))
    order = [{name: n for n, (name, _) in reversed([*enumerate(view)])} for view in views]
    return tuple(
        item
        for rank, items in enumerate(owned)
        for item in sorted(items, key=lambda item: (order[rank][item.name], item.cut.box))
    )


def _nearest_cut(
    shapes: Sequence[Sequence[int]], starts: Sequence[int], element: int, multiple: int
) -> int:
    """Return the possible cut that is nearest to an element, in elements of all parameters."""
    index = bisect_right(starts, element) - 1
    if index == len(shapes):
        return element
    unit = math.lcm(math.prod(shapes[index][1:]), multiple)
    below = starts[index] + (element - starts[index]) // unit * unit
    above = min(below + unit, starts[index + 1])
    return below if element - below <= above - element else above


def _rows(shape: tuple[int, ...], begin: int, end: int) -> Box:
    """Return the box of whole rows that has a range of elements of a parameter."""
    if not shape:
        return Box((), ())
    row = math.prod(shape[1:])
    offsets = (shape[0] + begin // row, *(0 for _ in shape[1:]))
    return Box(offsets, ((end - begin) // row, *shape[1:]))


def _choose_owners(
    holders: Mapping[str, Mapping[Box, Sequence[int]]], num_ranks: int
) -> dict[tuple[str, Box], int]:
    """Choose an owner for each box: first if there is no choice, then the largest boxes first."""
    loads = [0] * num_ranks
    shared: list[tuple[int, str, Box, Sequence[int]]] = []
    owners: dict[tuple[str, Box], int] = {}
    for name, boxes in holders.items():
        for box, ranks in boxes.items():
            if len(ranks) == 1:
                owners[name, box] = ranks[0]
                loads[ranks[0]] += box.num_elements
            else:
                shared.append((-box.num_elements, name, box, ranks))
    for size, name, box, ranks in sorted(shared):
        owner = min(ranks, key=lambda rank: (loads[rank], rank))
        owners[name, box] = owner
        loads[owner] -= size
    return owners


def _require_tiling(name: str, shape: tuple[int, ...], boxes: Mapping[Box, Sequence[int]]) -> None:
    """Check that distinct boxes have no element in common, and together have all elements."""
    overlap = first_overlap(boxes)
    if overlap is not None:
        first, second = overlap
        common = first.intersection(second)
        assert common is not None  # noqa: S101  (they overlap)
        raise BoxesError(
            f"parameter {name!r} of shape {list(shape)}: {_held(boxes, first)} and "
            f"{_held(boxes, second)} overlap in {common.notation()} without being equal, so "
            "no rank can own those elements. Shard the parameter by FSDP2 or by a mesh of "
            "DTensors, whose shards are equal or apart",
            name,
            sorted({*boxes[first], *boxes[second]}),
            overlap,
        )
    found, expected = sum(box.num_elements for box in boxes), math.prod(shape)
    if found != expected:
        named = ", ".join(_held(boxes, box) for box in sorted(boxes)[:_MOST_NAMED]) or "none"
        more = f" and {len(boxes) - _MOST_NAMED} more" if len(boxes) > _MOST_NAMED else ""
        raise BoxesError(
            f"parameter {name!r} of shape {list(shape)}: the boxes of all ranks have {found} of "
            f"its {expected} elements: {named}{more}. Give the parameter to the optimizer on every "
            "rank that has a part of it",
            name,
            sorted({rank for ranks in boxes.values() for rank in ranks}),
            sorted(boxes),
        )


def _held(boxes: Mapping[Box, Sequence[int]], box: Box) -> str:
    ranks = boxes[box]
    word = "rank" if len(ranks) == 1 else "ranks"
    return f"{box.notation()} of {word} {', '.join(map(str, ranks))}"
