"""Places of stored values: which chunk of which owner has some elements of a stored box."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from offload.checkpoint.checked_reads import CheckedReads
from offload.checkpoint.state_owners import StoredBox
from offload.format.arrays import ArrayFormat
from offload.format.chunk_plan import ChunkPlan


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Neighbouring elements of a stored box that are in one chunk."""

    stored: StoredBox
    """The stored box."""

    chunk: int
    """Index of the chunk in the layout of the box's owner."""

    number: int
    """Number of the box's piece in the chunk."""

    first: int
    """First element, counted from the first element of the piece."""

    num: int
    """Number of elements."""

    @property
    def plan(self) -> ChunkPlan:
        """Plan of the chunk."""
        return self.stored.owner.layout.plans[self.chunk]

    def num_values(self, form: ArrayFormat) -> int:
        """Return the number of values that stand for the elements."""
        return -(-(self.first + self.num) // form.block) - self.first // form.block

    def read(self, array: str, leaves: CheckedReads, out: memoryview) -> bool:
        """Read the values of a state array that stand for the elements.

        Args:
            array: Name of the state array, which the parameter has.
            leaves: Reader that compares all bytes with the digests.
            out: Memory of `num_values` values.

        Returns:
            False if nothing has been read, because no parameter of the chunk has state.

        Raises:
            DamagedError: The chunk is not as it was written.
            gds.StorageError: The chunk cannot be read.
        """
        layout, files = self.stored.owner.layout, self.stored.owner.files
        sealed = files.state_range(array, self.chunk)
        if sealed is None:
            return False
        form, share = layout.formats[array], self.plan.arrays[array]
        start = (share.starts[self.number] + self.first // form.block) * form.nbytes
        stop = start + self.num_values(form) * form.nbytes
        leaves.copy(files.file(sealed), sealed, files.context, start, stop, out)
        return True


def places(stored: StoredBox, first: int, num: int) -> Iterator[Place]:
    """Yield where neighbouring elements of a stored box are, in order.

    Args:
        stored: The stored box.
        first: First element, counted from the first element of the box.
        num: Number of elements.
    """
    layout, stop = stored.owner.layout, first + num
    chunks = layout.chunks_of(stored.index)
    while first < stop:
        element = layout.starts[stored.index] + first
        chunk = chunks[bisect_right(chunks, element, key=lambda one: layout.plans[one].first) - 1]
        pieces = layout.plans[chunk].pieces
        number = next(n for n, p in enumerate(pieces) if p.parameter == stored.index)
        piece = pieces[number]
        last = min(stop, piece.stop)
        yield Place(stored, chunk, number, first - piece.start, last - first)
        first = last
