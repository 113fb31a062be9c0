"""Plan of a chunk: the pieces of parameters in it, and its place in each state array's file.

A layout makes the plans of all its chunks once. Whatever moves or updates a chunk reads its plan,
so that no step repeats the arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of one parameter that lies in one chunk."""

    parameter: int
    """Index into `Layout.parameters`."""

    start: int
    """First element, counted from the parameter's first element."""

    stop: int
    """One past the last element, counted from the parameter's first element."""

    at: int
    """Position of `start`, in elements from the start of the chunk."""


@dataclass(frozen=True, slots=True)
class Span:
    """Neighbouring elements of a chunk whose parameters have the same state arrays."""

    pieces: tuple[Piece, ...]
    """Whole pieces of the chunk, or parts of them, in order; at least one."""

    values: Mapping[str, tuple[int, int]]
    """First stored value of the span and one past its last, by state array. Values are counted
    from the chunk's first value in the array."""


@dataclass(frozen=True, slots=True)
class ArrayShare:
    """The values of one state array that belong to a chunk."""

    file_name: str
    """Name of the array's file in a slot, and in each of its parts."""

    offset: int
    """Position of the first value in the file on the chunk's drive, in bytes."""

    nbytes: int

    block: int
    """Number of elements that one value stands for."""

    starts: tuple[int, ...]
    """Number of the chunk's values before each piece, then of all its values. A piece whose
    parameter lacks the array has none."""


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """Everything that the layout says about one chunk."""

    first: int
    """First element of the chunk, in element space."""

    last: int
    """One past the last element of the chunk, in element space."""

    drive: int
    """Drive that the chunk is on."""

    pieces: tuple[Piece, ...]
    """Pieces of parameters that make up the chunk, in order; no piece is empty."""

    kept: tuple[tuple[str, ...], ...]
    """State arrays of each piece's parameter."""

    arrays: Mapping[str, ArrayShare]
    """Share of the chunk in every state array of the layout, by array. A share may be empty."""

    def cut(self, numbers: Iterable[int], *, most: int, multiple: int = 1) -> list[Span]:
        """Cut neighbouring pieces into spans.

        Args:
            numbers: Numbers of the pieces, which are consecutive. Their parameters have the same
                state arrays.
            most: Maximal number of elements in a span; a multiple of `multiple`.
            multiple: A piece is only cut at multiples of this number of elements. If a value
                stands for several elements, `multiple` must be a multiple of that number.
        """
        spans: list[Span] = []
        taken: list[Piece] = []
        begin, room = 0, most
        for number in numbers:
            whole = self.pieces[number]
            start = whole.start
            while start < whole.stop:
                length = whole.stop - start
                if length > room:
                    length = room // multiple * multiple
                if length:
                    if not taken:
                        begin = number
                    taken.append(_part(whole, start, start + length))
                room -= length
                start += length
                if room == 0 or start < whole.stop:
                    spans.append(self._span(taken, begin))
                    taken, room = [], most
        if taken:
            spans.append(self._span(taken, begin))
        return spans

    def part(self, number: int, start: int, stop: int) -> Span:
        """Return a span of elements of one piece.

        Args:
            number: Number of the piece.
            start: First element, counted from the parameter's first element. If a value stands for
                several elements, it is where one of the piece's values begins.
            stop: One past the last element.
        """
        return self._span([_part(self.pieces[number], start, stop)], number)

    def _span(self, taken: Sequence[Piece], begin: int) -> Span:
        """Return a span, given its pieces and the number of the first."""
        end = begin + len(taken) - 1
        # If a value stands for a block of elements, blocks start anew at each piece.
        head = taken[0].start - self.pieces[begin].start
        tail = taken[-1].stop - self.pieces[end].start
        values = {}
        for name in self.kept[begin]:
            share = self.arrays[name]
            start = share.starts[begin] + head // share.block
            values[name] = (start, share.starts[end] - (-tail // share.block))
        return Span(tuple(taken), values)


def _part(whole: Piece, start: int, stop: int) -> Piece:
    if (start, stop) == (whole.start, whole.stop):
        return whole
    return Piece(whole.parameter, start, stop, whole.at + start - whole.start)
