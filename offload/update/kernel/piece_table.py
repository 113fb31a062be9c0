"""Tables of a layout's pieces, and the addresses of their values, which a kernel call points to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from offload.device.boundary import is_on_device
from offload.device.flat_tensors import FlatTensors
from offload.format.arrays import BLOCK_ELEMENTS, MASTER, MASTER_LOW
from offload.format.chunk_plan import Piece
from offload.format.layout import Layout, ParameterSpec
from offload.format.rounding_keys import WINDOW_BITS
from offload.update.kernel.forms import DTYPES, MASTERS

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

    def __len__(self) -> int:
        return len(self.parameters)

    def take(self, rows: Numbers) -> PieceTable:
        """Return some of the rows, given as indices or as a mask."""
        offsets = {name: column[rows] for name, column in self.offsets.items()}
        return PieceTable(self.parameters[rows], self.starts[rows], self.lengths[rows], offsets)

    def parts(self, most: int, formats: dict[str, tuple[int, int]]) -> list[PieceTable]:
        """Cut the table into tables of at most `most` elements.

        A piece is only cut at multiples of a block, counted from the piece's start.

        Args:
            most: Maximal number of elements of a table; a multiple of a block.
            formats: Bytes of a value and elements that it stands for, by array.
        """
        ends = np.cumsum(self.lengths)
        if not len(ends) or ends[-1] <= most:
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
    """Tables of all chunks of a layout, made when they are first needed.

    Args:
        layout: The layout.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.formats = {name: (f.nbytes, f.block) for name, f in layout.formats.items()}
        """Bytes of a stored value, and elements that it stands for, by array."""
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


class Addresses:
    """Addresses of the values of parameters, or of gradients.

    Values are used in place if a tensor is contiguous and in host memory. Flat views of all others
    are taken piece by piece.

    Args:
        tensors: Flat views of the tensors.
        num: Number of parameters.
    """

    def __init__(self, tensors: FlatTensors, num: int) -> None:
        self.tensors = tensors
        self.plain = np.zeros(num, dtype=bool)
        """Whether a tensor is used in place."""
        self.has_memory = np.zeros(num, dtype=bool)
        """Whether the values of a tensor are in memory that can be addressed."""
        self.pointers = np.zeros(num, dtype=np.uint64)
        """Address of the first value of a tensor that is used in place."""
        self.sizes = np.zeros(num, dtype=np.uint64)
        """Bytes of a value of a tensor that is used in place; 0 for all others."""
        self._is_known = np.zeros(num, dtype=bool)
        self._dtypes = np.zeros(num, dtype=np.uint32)

    def look(self, parameters: Numbers) -> None:
        """Find out which of these tensors can be used in place, and where they are."""
        for index in parameters[~self._is_known[parameters]].tolist():
            tensor = self.tensors.tensor(index)
            self._is_known[index] = True
            self.has_memory[index] = tensor is not None and _has_memory(tensor)
            if (
                tensor is not None
                and self.has_memory[index]
                and (number := DTYPES.get(tensor.dtype)) is not None
                and not is_on_device(tensor)
                and tensor.is_contiguous()
                and not tensor.is_neg()
            ):
                self.plain[index] = True
                self.pointers[index] = tensor.data_ptr()
                self._dtypes[index] = number
                self.sizes[index] = tensor.itemsize

    def addresses(
        self, table: PieceTable, held: list[torch.Tensor]
    ) -> tuple[Numbers, Numbers, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Return the address of each piece, uint64, and the number of its dtype, uint32.

        The third result has views that the kernel cannot read, such as those of negated or expanded
        tensors, and the copies at the address instead.
        """
        copies = []
        parameters = table.parameters
        found = self.pointers[parameters] + table.starts.astype(np.uint64) * self.sizes[parameters]
        dtypes = self._dtypes[parameters]
        for row in np.flatnonzero(~self.plain[parameters]).tolist():
            (view,) = self.tensors.views([_piece(table, row)])
            if not (view.is_contiguous() and view.dtype in DTYPES and not view.is_neg()):
                dtype = view.dtype if view.dtype in DTYPES else torch.float32
                copy = view.to(dtype).resolve_neg().contiguous()
                copies.append((view, copy))
                view = copy
            held.append(view)
            found[row], dtypes[row] = view.data_ptr(), DTYPES[view.dtype]
        return found, dtypes, copies

    def finish(self, table: PieceTable, rows: Numbers) -> None:
        """Report that pieces, given by their rows, are not used any more."""
        viewed = rows[~self.plain[table.parameters[rows]]]
        self.tensors.finish([_piece(table, row) for row in viewed.tolist()])


def _has_memory(tensor: torch.Tensor) -> bool:
    if is_on_device(tensor):
        return True  # its values are staged in host memory
    # A subclass that handles torch's operations itself may only stand for other tensors.
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return False
    return tensor.data_ptr() != 0  # zero for `torch._efficientzerotensor`


def _piece(table: PieceTable, row: int) -> Piece:
    start = int(table.starts[row])
    return Piece(int(table.parameters[row]), start, start + int(table.lengths[row]), 0)
