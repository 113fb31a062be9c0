"""Plan of the broadcasts that carry new values to all holders of a box. Pure arithmetic.

A *round* is the n-th chunk of every rank: each sends its new values, without padding, to the other
holders of their boxes. All ranks make the same plan and issue their broadcasts in its order, so any
two ranks issue those that they share in the same order. A box with one holder causes none.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from offload.format.boxes import Box
from offload.format.header import DTYPE_BYTES
from offload.format.layout import Layout
from offload.format.shares.dealing import OwnedBox

BoxKey: TypeAlias = tuple[str, Box]
"""Name of a tensor, and a box of it."""

SLICE_BYTES = 4 << 20
"""Default for the most bytes in one broadcast. Sizes from 4 to 16 MiB are equally fast."""

PACK_BYTES = 512 << 10
"""Pieces of fewer bytes share broadcasts. A broadcast on one host takes as long as copying about
1 MiB into a buffer and out of it again."""


@dataclass(frozen=True, slots=True)
class BoxPiece:
    """A range of elements of a box, counted in row-major order from the box's first element."""

    name: str
    box: Box
    dtype: str
    """safetensors code of the values: ``BF16``, ``F16``, ``F32``, ..."""

    start: int
    stop: int

    @property
    def key(self) -> BoxKey:
        """Name and box."""
        return self.name, self.box

    @property
    def nbytes(self) -> int:
        """Size of the values in bytes."""
        return (self.stop - self.start) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class RankChunk:
    """A chunk that one rank updates."""

    number: int
    """Number by which the rank reports that it has updated the chunk."""

    pieces: tuple[BoxPiece, ...]
    """Pieces whose values are new; may be empty."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One broadcast: values that an owner sends to all other holders."""

    round: int
    """Position of the chunk among the owner's chunks."""

    owner: int
    holders: tuple[int, ...]
    """Ranks that take part, in ascending order; the owner is one of them."""

    pieces: tuple[BoxPiece, ...]
    """Values of one dtype, end to end; at least one piece, none of them empty."""

    nbytes: int


class GatherPlan:
    """The broadcasts of one step, in the order in which all ranks issue them.

    Each rank's ``chunks`` are in the order in which it updates them. Values of *late* boxes, which
    are not contiguous, are in live memory, and sent, after the last of their chunks only.
    """

    def __init__(
        self,
        chunks: Sequence[Sequence[RankChunk]],
        holders: Mapping[BoxKey, Sequence[int]],
        *,
        late: Collection[BoxKey] = (),
        slice_bytes: int = SLICE_BYTES,
    ) -> None:
        _check(chunks, holders)
        self.num_ranks = len(chunks)
        self.slice_bytes = slice_bytes
        self.num_rounds = max(map(len, chunks), default=0)
        """Number of rounds: that of the chunks of the rank with most chunks."""
        self._rounds = [
            {chunk.number: position for position, chunk in enumerate(own)} for own in chunks
        ]
        self._stops: dict[int, Mapping[str, int]] = {}
        found: list[tuple[int, int, Transfer]] = []
        for owner, own in enumerate(chunks):
            for number, pieces in enumerate(_postponed(own, late)):
                for held_by, shared in _by_holders(pieces, holders).items():
                    shared.sort(key=lambda piece: piece.dtype)  # so that fewer broadcasts do
                    for n, sent in enumerate(_sliced(shared, slice_bytes)):
                        found.append((number, n, _transfer(number, owner, held_by, sent)))
        # The owners take turns within a round, so that traffic flows in all directions at once.
        found.sort(key=lambda item: (item[0], item[1], item[2].holders, item[2].owner))
        self.transfers = tuple(transfer for _, _, transfer in found)
        """The broadcasts of all ranks, in their order; empty if each box has one holder."""

    def of(self, rank: int) -> tuple[Transfer, ...]:
        """Return the broadcasts that a rank issues, in their order."""
        return tuple(transfer for transfer in self.transfers if rank in transfer.holders)

    def stops(self, rank: int) -> Mapping[str, int]:
        """Return how many of a rank's broadcasts bring it all new values of a tensor, by name.

        Tensors of which the rank receives nothing are left out.
        """
        if rank not in self._stops:
            self._stops[rank] = {
                piece.name: number
                for number, transfer in enumerate(self.of(rank), start=1)
                if transfer.owner != rank
                for piece in transfer.pieces
            }
        return self._stops[rank]

    def round_of(self, rank: int, number: int) -> int | None:
        """Return the round of a rank's chunk; None if the chunk is not in the plan."""
        return self._rounds[rank].get(number)


def layout_chunks(
    layout: Layout, *, order: Iterable[int] | None = None, stepped: Collection[str] | None = None
) -> list[RankChunk]:
    """Return the chunks of a rank's layout, with the pieces that a step changes."""
    found = []
    for number in range(layout.num_chunks) if order is None else order:
        pieces = []
        for piece in layout.plans[number].pieces:
            spec = layout.parameters[piece.parameter]
            if stepped is None or spec.name in stepped:
                box = Box.whole(spec.shape) if spec.cut is None else spec.cut.box
                pieces.append(BoxPiece(spec.name, box, spec.dtype, piece.start, piece.stop))
        if pieces:
            found.append(RankChunk(number, tuple(pieces)))
    return found


def box_plan(
    num_ranks: int, boxes: Iterable[OwnedBox], tensors: Iterable[tuple[str, str]]
) -> GatherPlan:
    """Return the plan that brings boxes of tensors from their owners to all that hold them.

    A tensor is given by the name in the boxes, which several may have, and its dtype. In the plan
    it is called by its number in decimal digits, and each owner has one chunk, number 0.
    """
    by_name: dict[str, list[OwnedBox]] = {}
    for one in boxes:
        by_name.setdefault(one.name, []).append(one)
    holders: dict[BoxKey, tuple[int, ...]] = {}
    pieces: list[list[BoxPiece]] = [[] for _ in range(num_ranks)]
    for number, (name, dtype) in enumerate(tensors):
        for one in by_name.get(name, ()):
            piece = BoxPiece(str(number), one.cut.box, dtype, 0, one.cut.box.num_elements)
            holders[piece.key] = one.holders
            pieces[one.owner].append(piece)
    return GatherPlan([[RankChunk(0, tuple(own))] if own else [] for own in pieces], holders)


def _postponed(
    chunks: Sequence[RankChunk], late: Collection[BoxKey]
) -> Iterator[Sequence[BoxPiece]]:
    """Yield the pieces to send after each chunk; those of late boxes come after their last one."""
    last = {piece.key: n for n, chunk in enumerate(chunks) for piece in chunk.pieces}
    waiting: dict[BoxKey, list[BoxPiece]] = {}
    for number, chunk in enumerate(chunks):
        ready: list[BoxPiece] = []
        for piece in chunk.pieces:
            if piece.start == piece.stop:
                continue
            if piece.key in late:
                waiting.setdefault(piece.key, []).append(piece)
            else:
                ready.append(piece)
        for key in [key for key in waiting if last[key] == number]:
            ready += waiting.pop(key)
        yield ready


def _by_holders(
    pieces: Iterable[BoxPiece], holders: Mapping[BoxKey, Sequence[int]]
) -> dict[tuple[int, ...], list[BoxPiece]]:
    """Return the pieces that several ranks hold, by those ranks."""
    found: dict[tuple[int, ...], list[BoxPiece]] = {}
    for piece in pieces:
        ranks = tuple(holders[piece.key])
        if len(ranks) > 1:
            found.setdefault(ranks, []).append(piece)
    return found


def _transfer(
    number: int, owner: int, holders: tuple[int, ...], pieces: tuple[BoxPiece, ...]
) -> Transfer:
    return Transfer(number, owner, holders, pieces, sum(piece.nbytes for piece in pieces))


def _sliced(pieces: Iterable[BoxPiece], most: int) -> Iterator[tuple[BoxPiece, ...]]:
    """Yield the content of each broadcast: a part of a large piece, or small ones of one dtype."""
    packed: list[BoxPiece] = []
    room = most
    for piece in pieces:
        nbytes = piece.nbytes
        if nbytes >= min(PACK_BYTES, most):
            step = most // DTYPE_BYTES[piece.dtype]
            for start in range(piece.start, piece.stop, step):
                yield (replace(piece, start=start, stop=min(start + step, piece.stop)),)
            continue
        if packed and (nbytes > room or packed[0].dtype != piece.dtype):
            yield tuple(packed)
            packed, room = [], most
        packed.append(piece)
        room -= nbytes
    if packed:
        yield tuple(packed)


def _check(chunks: Sequence[Sequence[RankChunk]], holders: Mapping[BoxKey, Sequence[int]]) -> None:
    """Raise `ValueError` if chunks and holders do not fit together; see `GatherPlan`."""
    taken: dict[BoxKey, list[tuple[int, int]]] = {}
    for rank, own in enumerate(chunks):
        if len({chunk.number for chunk in own}) < len(own):
            raise ValueError(f"rank {rank} updates a chunk twice: {[c.number for c in own]}")
        for piece in (piece for chunk in own for piece in chunk.pieces):
            name = f"{piece.name}{piece.box.notation()}"
            ranks = holders.get(piece.key, ())
            if rank not in ranks or list(ranks) != sorted({*ranks}) or ranks[-1] >= len(chunks):
                raise ValueError(
                    f"rank {rank} of {len(chunks)} updates {name}, whose holders are {[*ranks]}: "
                    "expected ascending ranks, and the updating rank among them"
                )
            if not 0 <= piece.start <= piece.stop <= piece.box.num_elements:
                raise ValueError(
                    f"elements {piece.start} to {piece.stop} are not within {name}, which has "
                    f"{piece.box.num_elements}"
                )
            if piece.start < piece.stop:
                _take(taken.setdefault(piece.key, []), piece, name)


def _take(ranges: list[tuple[int, int]], piece: BoxPiece, name: str) -> None:
    """Add a piece's range to sorted ranges; raise `ValueError` if it overlaps with one of them."""
    at = bisect_left(ranges, (piece.start, piece.stop))
    if (at < len(ranges) and ranges[at][0] < piece.stop) or (
        at and ranges[at - 1][1] > piece.start
    ):
        raise ValueError(
            f"elements {piece.start} to {piece.stop} of {name} overlap with others that are "
            "updated: each element must be updated by one rank, once"
        )
    ranges.insert(at, (piece.start, piece.stop))
