"""Tables of a layout's pieces: everything about a kernel call that steps have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from offload.format.arrays import BLOCK_ELEMENTS, MASTER, MASTER_LOW
from offload.format.layout import Layout, ParameterSpec
from offload.format.rounding_keys import WINDOW_BITS
from offload.update.kernel.forms import MASTERS

Numbers: TypeAlias = np.ndarray[Any, Any]

ABSENT = -1
"""Offset of an array that a parameter does not have."""


@dataclass(frozen=True, slots=True)
class PieceTable:
    """Pieces of one chunk, or parts of them, in order: one number for each."""

    parameters: Numbers
    """Index of the parameter, int64."""

    starts: Numbers
    """First element within the parameter, int64."""

    lengths: Numbers
    """Number of elements, int64."""

    offsets: dict[str, Numbers]
    """Position of the first stored value in the chunk's share of each array, in bytes, int64;
    `ABSENT` if the parameter lacks the array."""

    def take(self, rows: Numbers) -> PieceTable:
        """Return some of the rows, given as indices or as a mask."""
        offsets = {name: column[rows] for name, column in self.offsets.items()}
        return PieceTable(self.parameters[rows], self.starts[rows], self.lengths[rows], offsets)

    def parts(self, most: int, formats: dict[str, tuple[int, int]]) -> list[PieceTable]:
        """Cut the table into tables of at most `most` elements; pieces only between blocks."""
        ends = np.cumsum(self.lengths)
        if not len(ends):
            return []
        if ends[-1] <= most:
            return [self]
        rows: list[list[tuple[int, int, int]]] = [[]]  # row, first element in it, one past the last
        room = most
        for row, length in enumerate(self.lengths.tolist()):
            begin = 0
            while begin < length:
                if room < BLOCK_ELEMENTS:
                    rows.append([])
                    room = most
                taken = length - begin
                if taken > room:
                    taken = room // BLOCK_ELEMENTS * BLOCK_ELEMENTS
                rows[-1].append((row, begin, begin + taken))
                begin += taken
                room -= taken
        return [self._part(np.array(part, dtype=np.int64), formats) for part in rows]

    def within_windows(
        self, formats: dict[str, tuple[int, int]], rounding_starts: Numbers
    ) -> PieceTable:
        """Return the table with pieces cut at windows, whose random numbers have other keys."""
        firsts = self.starts + rounding_starts[self.parameters]
        if not ((firsts >> WINDOW_BITS) != (firsts + self.lengths - 1 >> WINDOW_BITS)).any():
            return self
        rows = []
        for row, (start, length) in enumerate(
            zip(firsts.tolist(), self.lengths.tolist(), strict=True)
        ):
            begin = 0
            while begin < length:
                window_end = ((start + begin >> WINDOW_BITS) + 1 << WINDOW_BITS) - start
                end = min(length, window_end)
                rows.append((row, begin, end))
                begin = end
        return self._part(np.array(rows, dtype=np.int64), formats)

    def _part(self, part: Numbers, formats: dict[str, tuple[int, int]]) -> PieceTable:
        rows, begins, ends = part[:, 0], part[:, 1], part[:, 2]
        offsets = {}
        for name, column in self.offsets.items():
            nbytes, block = formats[name]
            values = column[rows]
            offsets[name] = np.where(values < 0, values, values + begins // block * nbytes)
        return PieceTable(self.parameters[rows], self.starts[rows] + begins, ends - begins, offsets)


class LayoutTables:
    """Tables of all chunks of a layout, made when they are first needed."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.formats = {name: (f.nbytes, f.block) for name, f in layout.formats.items()}
        """Bytes of a stored value, and elements that it stands for, by array."""
        self.num_elements = np.array([p.num_elements for p in layout.parameters], dtype=np.int64)
        """Number of elements of each parameter."""
        self.master_forms = np.array([_master_form(p) for p in layout.parameters], dtype=np.uint32)
        """Number of each parameter's form of the master."""
        self.rounding_starts = np.array(layout.rounding_starts, dtype=np.int64)
        """Index of each parameter's first element in stochastic rounding."""
        self._pieces: dict[int, Numbers] = {}
        self._chunks: dict[int, PieceTable] = {}

    def chunk(self, chunk: int) -> PieceTable:
        """Return the table of a chunk."""
        table = self._chunks.get(chunk)
        if table is None:
            table = self._chunks[chunk] = self._table(chunk)
        return table

    def pieces(self, chunk: int) -> Numbers:
        """Return the parameter of each piece of a chunk, int64; see `ChunkPlan.pieces`."""
        found = self._pieces.get(chunk)
        if found is None:
            pieces = self.layout.plans[chunk].pieces
            found = np.array([piece.parameter for piece in pieces], dtype=np.int64)
            self._pieces[chunk] = found
        return found

    def _table(self, chunk: int) -> PieceTable:
        plan = self.layout.plans[chunk]
        pieces = [(piece.parameter, piece.start, piece.stop) for piece in plan.pieces]
        columns = np.array(pieces, dtype=np.int64).reshape(-1, 3).T.copy()
        offsets = {}
        for name, share in plan.arrays.items():
            starts = np.array(share.starts[:-1], dtype=np.int64) * self.formats[name][0]
            lacks = np.array([name not in kept for kept in plan.kept], dtype=bool)
            offsets[name] = np.where(lacks, ABSENT, starts)
        whole = PieceTable(columns[0], columns[1], columns[2] - columns[1], offsets)
        return whole.within_windows(self.formats, self.rounding_starts)


def _master_form(spec: ParameterSpec) -> int:
    if MASTER_LOW in spec.arrays:
        return MASTERS["split"]
    return MASTERS["float32" if MASTER in spec.arrays else "own"]
