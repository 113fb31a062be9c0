"""Batches and blocks in which ranks write one model file together. Pure arithmetic.

A rank writes a block of 4096 bytes that is all its own directly to the device. Its bytes of any
other block are an *edge*, written through the page cache byte by byte. All processes of a host have
the same page cache, so no rank overwrites the bytes of another one with old ones, as reading,
changing and writing a whole block would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from gds import ALIGNMENT
from offload.format.shares.model_shares import ModelShare, SharePiece

Range = tuple[int, int]
"""First byte of a range, and one past the last, in bytes from the start of a file."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Bytes that are adjacent in the file and in the memory of a batch."""

    at: int
    """Place of the first gathered byte, in bytes from the start of the memory. It has the same
    remainder modulo 4096 as `start`."""

    start: int
    """First gathered byte, in bytes from the start of the file."""

    stop: int
    """One past the last gathered byte, in bytes from the start of the file."""

    position: int
    """Place of the first gathered byte in the share; see `SharePiece.position`."""

    carried: int = 0
    """Number of bytes before `start` that are copied from the end of the previous batch's memory,
    because they are in the same block as `start`."""

    continues: bool = False
    """Whether the next batch begins with the byte at `stop`. The bytes of the last block, if it is
    partial, are then carried to that batch and written by it."""

    @property
    def nbytes(self) -> int:
        """Number of gathered bytes."""
        return self.stop - self.start

    @property
    def written(self) -> Range:
        """Range of the file that is written with this batch; it may be empty."""
        return self.start - self.carried, _down(self.stop) if self.continues else self.stop


@dataclass(frozen=True, slots=True)
class PlacedPiece:
    """A piece of a share in the memory of a batch."""

    index: int
    """Index of the piece in the sequence that was cut into batches."""

    at: int
    """Place of its first byte, in bytes from the start of the memory."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Pieces that are in memory at the same time, each as a whole."""

    segments: tuple[Segment, ...]
    pieces: tuple[PlacedPiece, ...]

    nbytes: int
    """Size of the memory in bytes."""

    position: int
    """Number of bytes of the share up to the end of the batch."""


@dataclass(frozen=True, slots=True)
class Writes:
    """Ranges of the file that are written for a segment."""

    blocks: tuple[Range, ...]
    """Whole blocks, in ascending order; all their bytes are in the segment."""

    edges: tuple[Range, ...]
    """Parts of blocks: at most one at each end of the segment."""


@dataclass(frozen=True)
class SharePlan:
    """The batches in which a share is written."""

    share: ModelShare

    @cached_property
    def batches(self) -> tuple[Batch, ...]:
        """Batches of all pieces of the share, in their order."""
        return cut_batches(self.share.pieces, capacity_for(self.share.piece_bytes))

    @property
    def buffer_bytes(self) -> int:
        """Size of the memory that a batch needs, in bytes; at least one block."""
        return max((batch.nbytes for batch in self.batches), default=ALIGNMENT)


def capacity_for(piece_bytes: int) -> int:
    """Return the size of memory that holds any piece at its offset modulo 4096, in bytes."""
    return _up(piece_bytes) + ALIGNMENT


def cut_batches(pieces: Sequence[SharePiece], capacity_bytes: int) -> tuple[Batch, ...]:
    """Cut pieces into batches that fit into memory.

    Args:
        pieces: Pieces in ascending order of their places in the file.
        capacity_bytes: Size of the memory in bytes, at least `capacity_for` of the largest piece.
    """
    batches: list[Batch] = []
    segments: list[Segment] = []
    placed: list[PlacedPiece] = []

    def close(*, continues: bool) -> None:
        """End the batch. Its last tensor may go on in the next one."""
        last = segments[-1] = replace(segments[-1], continues=continues)
        end = last.at + last.nbytes
        batches.append(Batch(tuple(segments), tuple(placed), _up(end), last.position + last.nbytes))
        segments.clear()
        placed.clear()

    for index, piece in enumerate(pieces):
        last = segments[-1] if segments else None
        adjoins = last is not None and last.stop == piece.start
        if last is not None and _place(last, piece, adjoins) + piece.nbytes > capacity_bytes:
            close(continues=adjoins)
            carried = piece.start % ALIGNMENT if adjoins else 0
            if carried:
                written, _ = batches[-1].segments[-1].written
                carried = min(carried, piece.start - written)
            segments.append(
                Segment(piece.start % ALIGNMENT, piece.start, piece.stop, piece.position, carried)
            )
        elif last is not None and adjoins:
            segments[-1] = replace(last, stop=piece.stop)
        else:
            at = piece.start % ALIGNMENT if last is None else _place(last, piece, adjoins)
            segments.append(Segment(at, piece.start, piece.stop, piece.position))
        last = segments[-1]
        placed.append(PlacedPiece(index, last.at + piece.start - last.start))
    if segments:
        close(continues=False)
    return tuple(batches)


def _place(last: Segment, piece: SharePiece, adjoins: bool) -> int:
    """Return where a piece lies in memory that ends with a segment."""
    end = last.at + last.nbytes
    return end if adjoins else _up(end) + piece.start % ALIGNMENT


def writes_of(segment: Segment, changed: Sequence[Range]) -> Writes:
    """Return what has to be written of a segment.

    A block is written as a whole if any of its bytes has changed.

    Args:
        segment: Segment of a batch.
        changed: Ranges of the file whose content has changed, in ascending order and apart. Bytes
            outside of the segment are ignored.
    """
    first, last = segment.written
    if first >= last:
        return Writes((), ())
    head, tail = min(_up(first), last), max(_down(last), min(_up(first), last))
    blocks: list[Range] = []
    edges: list[Range] = []
    for start, stop in ((first, head), (tail, last)):
        if start < stop and any(a < stop and start < b for a, b in changed):
            edges.append((start, stop))
    for start, stop in changed:
        low, high = max(_down(start), head), min(_up(stop), tail)
        if low >= high:
            continue
        if blocks and low <= blocks[-1][1]:
            blocks[-1] = blocks[-1][0], max(high, blocks[-1][1])
        else:
            blocks.append((low, high))
    return Writes(tuple(blocks), tuple(edges))


def _down(offset: int) -> int:
    return offset // ALIGNMENT * ALIGNMENT


def _up(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
