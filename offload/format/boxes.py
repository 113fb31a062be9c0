"""Boxes of parameters: the unit in which many ranks divide a model and its state. Pure arithmetic.

A box is a rectangular range of a parameter: an offset and a size in each dimension. A rank of DDP
steps whole parameters or rows of them, and a rank of FSDP2 steps its local shards; both are boxes.
torch.distributed.checkpoint and the sharded files of Hugging Face describe shards in the same way.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """A rectangular range of elements of a tensor.

    Boxes are ordered by their offsets, then by their sizes.

    Args:
        offsets: First element in each dimension.
        sizes: Number of elements in each dimension. A box with a size of 0 is empty.

    Raises:
        ValueError: Offsets and sizes have different lengths, or a number is negative.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.sizes) or min((*self.offsets, *self.sizes), default=0) < 0:
            raise ValueError(
                f"offsets {self.offsets} and sizes {self.sizes} are no box: expected one "
                "non-negative offset and one non-negative size for each dimension"
            )

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box of all elements of a tensor with a shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def stops(self) -> tuple[int, ...]:
        """One past the last element in each dimension."""
        return tuple(o + s for o, s in zip(self.offsets, self.sizes, strict=True))

    @property
    def num_elements(self) -> int:
        """Number of elements; 1 for the box of a 0-d tensor."""
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index that selects the box in a tensor."""
        return tuple(slice(o, o + s) for o, s in zip(self.offsets, self.sizes, strict=True))

    def fits(self, shape: Sequence[int]) -> bool:
        """Return whether the box lies within a tensor with a shape."""
        return len(shape) == len(self.sizes) and all(
            stop <= n for stop, n in zip(self.stops, shape, strict=True)
        )

    def intersection(self, other: Box) -> Box | None:
        """Return the elements that both boxes have; None if there are none."""
        if len(self.sizes) != len(other.sizes):
            return None
        offsets = tuple(map(max, self.offsets, other.offsets))
        stops = tuple(map(min, self.stops, other.stops))
        if any(stop <= offset for offset, stop in zip(offsets, stops, strict=True)):
            return None
        return Box(offsets, tuple(s - o for o, s in zip(offsets, stops, strict=True)))

    def shifted(self, by: Sequence[int]) -> Box:
        """Return the box with a number added to the offset in each dimension."""
        return Box(tuple(o + n for o, n in zip(self.offsets, by, strict=True)), self.sizes)

    def within(self, outer: Box) -> Box:
        """Return the same box with offsets that are counted from the start of another box.

        Raises:
            ValueError: The box begins before the other one.
        """
        return self.shifted([-offset for offset in outer.offsets])

    def runs(self, shape: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield the contiguous ranges of the box in a contiguous tensor of a shape, in elements.

        Ranges come in row-major order; each is as long as it can be.
        """
        if not self.num_elements:
            return
        whole = self.contiguous_range(shape)
        if whole is not None:
            yield whole
            return
        last = max(d for d, (size, n) in enumerate(zip(self.sizes, shape, strict=True)) if size < n)
        strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
        length = self.sizes[last] * strides[last]
        first = self.offsets[last] * strides[last]
        outer = [range(o, o + s) for o, s in zip(self.offsets[:last], self.sizes, strict=False)]
        for index in itertools.product(*outer):
            start = first + sum(i * s for i, s in zip(index, strides, strict=False))
            yield start, start + length

    def contiguous_range(self, shape: Sequence[int]) -> tuple[int, int] | None:
        """Return the range of the box in a contiguous tensor of a shape, in elements.

        Returns:
            The first element, and one past the last; None if the elements are not adjacent. The
            range of an empty box is (0, 0).
        """
        if self.num_elements == 0:
            return 0, 0
        # Dimensions behind the first one that is cut must be whole, or have one element in front.
        cut = [d for d, (size, n) in enumerate(zip(self.sizes, shape, strict=True)) if size < n]
        if cut and any(size != 1 for size in self.sizes[: cut[-1]]):
            return None
        start = 0
        for offset, n in zip(self.offsets, shape, strict=True):
            start = start * n + offset
        return start, start + self.num_elements

    def notation(self) -> str:
        """Return the box as an index: ``[2:4, 0:16]``, and ``[2:4,]`` for a vector.

        The comma of a vector's box tells it apart from a flat range of elements, ``[2:4]``.
        """
        parts = [f"{o}:{o + s}" for o, s in zip(self.offsets, self.sizes, strict=True)]
        return f"[{parts[0]},]" if len(parts) == 1 else f"[{', '.join(parts)}]"


def cut_range(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Cut a range of a contiguous tensor's elements into boxes of the tensor.

    Args:
        shape: Shape of the tensor.
        start: First element of the range, in row-major order.
        stop: One past the last element.

    Yields:
        The boxes, in row-major order; together they have the elements of the range in their order.
    """
    if not shape:
        yield Box((), ())
        return
    inner = math.prod(shape[1:])
    rest = (0,) * (len(shape) - 1)
    if len(shape) == 1 or (start == 0 and stop == shape[0] * inner):
        num = stop - start if len(shape) == 1 else shape[0]
        yield Box((start // max(inner, 1), *rest), (num, *shape[1:]))
        return
    while start < stop:
        row, column = divmod(start, inner)
        if column == 0 and stop - start >= inner:
            num = (stop - start) // inner
            yield Box((row, *rest), (num, *shape[1:]))
            start += num * inner
            continue
        last = min(inner, column + stop - start)
        for box in cut_range(shape[1:], column, last):
            yield Box((row, *box.offsets), (1, *box.sizes))
        start += last - column


@dataclass(frozen=True, slots=True)
class Cut:
    """A box together with the shape of the parameter that it was cut from.

    Raises:
        ValueError: The box does not lie within the shape.
    """

    shape: tuple[int, ...]
    """Shape of the whole parameter."""

    box: Box

    def __post_init__(self) -> None:
        if not self.box.fits(self.shape):
            raise ValueError(f"the box {self.box.notation()} is not within the shape {self.shape}")


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


def first_overlap(boxes: Iterable[Box]) -> tuple[Box, Box] | None:
    """Return two of the boxes of a tensor that have an element in common; None if there are none.

    Boxes that share no row are not compared.
    """
    near: list[Box] = []  # boxes whose rows may not have ended yet
    for box in sorted(boxes):
        if box.sizes:
            near = [other for other in near if other.stops[0] > box.offsets[0]]
        for other in near:
            if other.intersection(box) is not None:
                return other, box
        near.append(box)
    return None


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
