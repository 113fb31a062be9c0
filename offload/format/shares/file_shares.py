"""Shares of a common model file that may have boxes which are not contiguous. Pure arithmetic.

Tensor parallelism cuts some parameters in another dimension than the first. A rank's box of such a
tensor is *scattered*: many short runs of the file, between which are those of other ranks. Every
rank of a host writes its runs through the page cache, which all of them share. When all ranks have
written, the rows of the tensor are complete in the cache. Each rank then computes the digests of
some whole rows. So all boxes with digests are contiguous in the file, and readers need not know how
the tensors were cut. `model.safetensors` stays one file that Hugging Face opens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from offload.format.boxes import Box, Cut
from offload.format.header import DTYPE_BYTES
from offload.format.layout import Layout
from offload.format.shares.model_shares import ModelShare, ModelShares, TensorBox

_NOTHING: Final = ModelShare(())


@dataclass(frozen=True)
class ScatteredBox:
    """A box that is not contiguous in its tensor."""

    name: str
    """Name of the tensor in the file."""

    dtype: str
    """safetensors code of the tensor."""

    cut: Cut
    """Shape of the whole tensor, and the box."""

    start: int
    """First byte of the tensor, in bytes from the start of the file."""

    @property
    def nbytes(self) -> int:
        """Size of the box in bytes."""
        return self.cut.box.num_elements * DTYPE_BYTES[self.dtype]

    @cached_property
    def _dims(self) -> int:
        """Number of dimensions in front of the last one that is cut."""
        pairs = zip(self.cut.box.sizes, self.cut.shape, strict=True)
        return max(dim for dim, (size, n) in enumerate(pairs) if size < n)

    @property
    def run_bytes(self) -> int:
        """Size of each run in bytes."""
        sizes = (self.cut.box.sizes[self._dims], *self.cut.shape[self._dims + 1 :])
        return math.prod(sizes) * DTYPE_BYTES[self.dtype]

    def runs(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Cut a range of the box's bytes into ranges of the file.

        Args:
            first: First byte of the box, in row-major order of its elements.
            last: One past the last byte.

        Yields:
            For each run that the range touches: its first byte in the file, and the first byte of
            the box and one past the last that lie there.
        """
        box, shape = self.cut.box, self.cut.shape
        size, length = DTYPE_BYTES[self.dtype], self.run_bytes
        strides = [math.prod(shape[dim + 1 :]) * size for dim in range(self._dims + 1)]
        outer = box.sizes[: self._dims]
        for number in range(first // length, -(-last // length)):
            at, rest = self.start + box.offsets[self._dims] * strides[-1], number
            for dim in range(len(outer) - 1, -1, -1):
                rest, index = divmod(rest, outer[dim])
                at += (box.offsets[dim] + index) * strides[dim]
            start, stop = max(first, number * length), min(last, (number + 1) * length)
            yield at + start - number * length, start, stop


@dataclass(frozen=True)
class FileShare:
    """What one rank does for a common model file."""

    copied: ModelShare
    """Contiguous boxes that the rank copies from its live memory, with their digests."""

    scattered: tuple[ScatteredBox, ...] = ()
    """Boxes that it copies run by run, after the contiguous ones."""

    rows: ModelShare = _NOTHING
    """Rows of tensors that the ranks have written together; the rank has their digests."""

    through_cache: bool = False
    """Whether all ranks write through the page cache, because a box of some rank is scattered. A
    direct write must not touch a block in the cache that another rank has changed."""

    @cached_property
    def digested(self) -> ModelShare:
        """All boxes whose digests the rank has."""
        entries = sorted((*self.copied.entries, *self.rows.entries), key=lambda one: one.start)
        return replace(self.copied, entries=tuple(entries))

    @property
    def nbytes(self) -> int:
        """Number of bytes that the rank copies from live memory."""
        return self.copied.nbytes + sum(one.nbytes for one in self.scattered)

    def stop_of(self, name: str, box: Box | None = None) -> int:
        """Return how much must have been copied before a tensor may change.

        See `ModelShare.stop_of`. Scattered boxes are copied after all contiguous ones.
        """
        found, end = self.copied.stop_of(name, box), self.copied.nbytes
        for one in self.scattered:
            end += one.nbytes
            if one.name == name and (box is None or one.cut.box.intersection(box) is not None):
                found = end
        return found

    def model_stops(self, layout: Layout) -> tuple[int, ...]:
        """Return, for each chunk, how much must have been copied before its step.

        See `ModelShare.model_stops`.
        """
        if not self.scattered:
            return self.copied.model_stops(layout)
        stops = [self.stop_of(p.name, p.cut.box if p.cut else None) for p in layout.parameters]
        return tuple(
            max((stops[piece.parameter] for piece in plan.pieces), default=0)
            for plan in layout.plans
        )


def file_share(shares: ModelShares, rank: int) -> FileShare:
    """Return what a rank does for the common file.

    Args:
        shares: Boxes of all ranks.
        rank: Index of the rank.
    """
    entries = shares.header.entries
    names = {
        one.name
        for boxes in shares.boxes
        for one in boxes
        if one.box.contiguous_range(entries[one.name].shape) is None
    }
    if not names:
        return FileShare(shares.share(rank))
    own = [one for one in shares.boxes[rank] if one.name not in names]
    rows = []
    for name in sorted(names, key=lambda name: entries[name].start):
        shape = entries[name].shape
        first, last = (shape[0] * (rank + n) // len(shares.boxes) for n in (0, 1))
        if first < last:
            rest = shape[1:]
            rows.append(TensorBox(name, Box((first, *(0 for _ in rest)), (last - first, *rest))))
    scattered = tuple(
        ScatteredBox(
            one.name,
            entries[one.name].dtype,
            Cut(entries[one.name].shape, one.box),
            shares.header.data_start + entries[one.name].start,
        )
        for one in shares.boxes[rank]
        if one.name in names
    )
    return FileShare(_share(shares, own), scattered, _share(shares, rows), through_cache=True)


def _share(shares: ModelShares, boxes: list[TensorBox]) -> ModelShare:
    return replace(shares, boxes=(tuple(boxes),)).share(0)
