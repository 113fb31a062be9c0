"""Places of chunks in ``model.safetensors``, for steps that write parameters beside their state.

Element space and the model file have trained parameters of one dtype in the same order. So those
of a chunk are one range of the file, or a few: a new one begins where the dtype changes, and at a
parameter that was added to the groups later.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, takewhile

from offload.format.chunk_plan import Piece
from offload.format.header import DTYPE_BYTES
from offload.format.layout import Layout

_PAGE_BYTES = 4096
"""Alignment of direct I/O. A range begins at the same position of a page in memory as in the file,
so that its whole pages can be transferred directly."""


@dataclass(frozen=True, slots=True)
class ModelRange:
    """Neighbouring parts of parameters of one dtype: in a chunk, and in the model file."""

    pieces: tuple[Piece, ...]
    """The parts, in order."""

    dtype: str
    """safetensors code of the dtype."""

    start: int
    """First byte, counted from the start of the file's data."""

    stop: int
    """One past the last byte."""

    at: int
    """Place of the first byte in the memory for the chunk's ranges."""

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.stop - self.start


class ModelPlaces:
    """Ranges of the model file that belong to the chunks of a layout of whole parameters."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        header = layout.model_header
        self.data_start = header.data_start
        """Position of the data in the file, in bytes."""
        self.data_bytes = header.file_bytes - header.data_start
        """Size of the data in bytes."""

    @cached_property
    def ranges(self) -> tuple[tuple[ModelRange, ...], ...]:
        """The ranges of each chunk, in the order of its pieces. They do not overlap."""
        return tuple(tuple(self._ranges(plan.pieces)) for plan in self._layout.plans)

    @cached_property
    def memory_bytes(self) -> int:
        """Memory in bytes that the ranges of any one chunk take."""
        last = [ranges[-1] for ranges in self.ranges if ranges]
        return max((one.at + one.nbytes for one in last), default=0)

    def name_of(self, piece: Piece) -> str:
        """Return the name of the parameter that a piece is of."""
        return self._layout.parameters[piece.parameter].name

    def chunks_with(self, start: int, stop: int) -> list[int]:
        """Return the chunks that hold any of the bytes `start` to `stop` of the file's data."""
        first = max(bisect_left(self._in_order, (start, 0, 0)) - 1, 0)
        found = takewhile(lambda one: one[0] < stop, islice(self._in_order, first, None))
        return [chunk for _, end, chunk in found if end > start]

    @cached_property
    def _in_order(self) -> list[tuple[int, int, int]]:
        """First byte, one past the last byte, and chunk of each range, in the order of the file."""
        return sorted(
            (one.start, one.stop, chunk)
            for chunk, ranges in enumerate(self.ranges)
            for one in ranges
        )

    def _ranges(self, pieces: Sequence[Piece]) -> list[ModelRange]:
        entries, parameters = self._layout.model_header.entries, self._layout.parameters
        found: list[tuple[list[Piece], str, int, int]] = []
        for piece in pieces:
            spec = parameters[piece.parameter]
            size, begin = DTYPE_BYTES[spec.dtype], entries[spec.name].start
            start, stop = begin + piece.start * size, begin + piece.stop * size
            if found and found[-1][1] == spec.dtype and found[-1][3] == start:
                same, dtype, first, _ = found.pop()
                found.append(([*same, piece], dtype, first, stop))
            else:
                found.append(([piece], spec.dtype, start, stop))
        ranges: list[ModelRange] = []
        end = 0
        for same, dtype, start, stop in found:
            at = -(-end // _PAGE_BYTES) * _PAGE_BYTES + (self.data_start + start) % _PAGE_BYTES
            ranges.append(ModelRange(tuple(same), dtype, start, stop, at))
            end = at + stop - start
        return ranges
