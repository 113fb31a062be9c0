"""Division of the model's files among ranks: which rank writes which bytes. Pure arithmetic.

A rank writes boxes of tensors, and every element of every tensor belongs to exactly one box of one
rank. A box has digests of its own, so a rank computes those of its share without the bytes of
others, and a reader checks one box without another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from offload.errors import MismatchError
from offload.format.boxes import Box, Cut, uncovered
from offload.format.digests import MODEL_BLOCK_BYTES, model_box_array
from offload.format.header import DTYPE_BYTES, Header, TensorEntry
from offload.format.layout import Layout
from offload.format.model_shard import ModelShard


@dataclass(frozen=True, slots=True)
class TensorBox:
    """A box of a tensor of the model file. A box that `Box.whole` returns is the whole tensor."""

    name: str

    box: Box


@dataclass(frozen=True, slots=True)
class ShareEntry:
    """A box that a rank writes, and its place in a file."""

    name: str

    dtype: str

    cut: Cut
    """Shape of the whole tensor, and the box."""

    start: int
    """First byte of the box, in bytes from the start of the file."""

    @property
    def box(self) -> Box:
        """The box."""
        return self.cut.box

    @property
    def nbytes(self) -> int:
        """Size of the box in bytes."""
        return self.cut.box.num_elements * DTYPE_BYTES[self.dtype]

    @property
    def digest_array(self) -> str:
        """Array name that the digests of the box are bound to."""
        return model_box_array(self.name, self.box)


@dataclass(frozen=True, slots=True)
class SharePiece:
    """A part of a box, of at most `MODEL_BLOCK_BYTES`, which has one digest."""

    entry: int
    """Index of the box in the share's entries."""

    number: int
    """Index of the piece among the pieces of its box."""

    start: int
    """First byte, in bytes from the start of the file."""

    stop: int
    """One past the last byte, in bytes from the start of the file."""

    position: int
    """Number of bytes of the share before the piece, in the order of the entries."""

    @property
    def nbytes(self) -> int:
        """Size of the piece in bytes."""
        return self.stop - self.start


@dataclass(frozen=True)
class ModelShare:
    """The boxes that one rank writes to one file, in the order of their bytes."""

    entries: tuple[ShareEntry, ...]
    """Boxes that have elements, in ascending order of `ShareEntry.start`."""

    piece_bytes: int = MODEL_BLOCK_BYTES
    """Largest size of a piece in bytes."""

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """Number of bytes of the share before each entry, then the number of all its bytes."""
        return tuple(accumulate((entry.nbytes for entry in self.entries), initial=0))

    @property
    def nbytes(self) -> int:
        """Number of bytes that the rank writes to the file."""
        return self.positions[-1]

    @cached_property
    def pieces(self) -> tuple[SharePiece, ...]:
        """Pieces of all boxes, in the order of their bytes; each has one digest."""
        return tuple(
            SharePiece(
                index,
                first // self.piece_bytes,
                entry.start + first,
                entry.start + min(first + self.piece_bytes, entry.nbytes),
                position + first,
            )
            for index, (entry, position) in enumerate(
                zip(self.entries, self.positions[:-1], strict=True)
            )
            for first in range(0, entry.nbytes, self.piece_bytes)
        )

    @cached_property
    def by_name(self) -> Mapping[str, tuple[int, ...]]:
        """Indices of the entries of each tensor."""
        found: dict[str, list[int]] = {}
        for index, entry in enumerate(self.entries):
            found.setdefault(entry.name, []).append(index)
        return {name: tuple(indices) for name, indices in found.items()}

    def stop_of(self, name: str, box: Box | None = None) -> int:
        """Return how much of the share must have been copied before a tensor may change.

        Args:
            name: Name of the tensor.
            box: Box that is about to change; None for the whole tensor.

        Returns:
            A number of bytes of the share. A writer that has copied so many bytes has copied every
            element of the box that belongs to the share. The number is 0 if there is none.
        """
        return max(
            (
                self.positions[index + 1]
                for index in self.by_name.get(name, ())
                if box is None or self.entries[index].box.intersection(box) is not None
            ),
            default=0,
        )

    def model_stops(self, layout: Layout) -> tuple[int, ...]:
        """Return, for each chunk of a layout, how much of the share must be copied before its step.

        This takes the place of `Layout.model_stops`, which counts bytes of a whole file.
        """
        stops = [self.stop_of(p.name, p.cut.box if p.cut else None) for p in layout.parameters]
        return tuple(
            max((stops[piece.parameter] for piece in plan.pieces), default=0)
            for plan in layout.plans
        )


@dataclass(frozen=True)
class ModelShares:
    """The boxes that each rank writes; together they are all elements of all tensors."""

    header: Header
    """Header of the common file, with every tensor and its whole shape."""

    boxes: tuple[tuple[TensorBox, ...], ...]
    """For each rank, its boxes with elements, in the order of the header's tensors and, within a
    tensor, in the order of their offsets."""

    piece_bytes: int = MODEL_BLOCK_BYTES
    """Largest size of a piece with one digest, in bytes."""

    def share(self, rank: int) -> ModelShare:
        """Return a rank's share of the common file.

        Raises:
            MismatchError: A box is not contiguous in the file; names it.
        """
        if self._scattered is not None:
            name, box = self._scattered
            raise MismatchError(
                f"the box {box.notation()} of {name!r} with shape "
                f"{list(self.header.entries[name].shape)} is not contiguous in a common model "
                "file: write shard files"
            )
        entries = []
        for one in self.boxes[rank]:
            entry = self.header.entries[one.name]
            first, _ = one.box.contiguous_range(entry.shape) or (0, 0)
            start = self.header.data_start + entry.start + first * DTYPE_BYTES[entry.dtype]
            entries.append(ShareEntry(entry.name, entry.dtype, Cut(entry.shape, one.box), start))
        return ModelShare(tuple(entries), self.piece_bytes)

    @cached_property
    def _scattered(self) -> tuple[str, Box] | None:
        """The first box that is not contiguous in its tensor; None if there is none."""
        for boxes in self.boxes:
            for one in boxes:
                if one.box.contiguous_range(self.header.entries[one.name].shape) is None:
                    return one.name, one.box
        return None


def divide(
    header: Header,
    owned: Sequence[Iterable[TensorBox]],
    *,
    writer: int = 0,
    piece_bytes: int = MODEL_BLOCK_BYTES,
) -> ModelShares:
    """Divide a model file among ranks.

    Args:
        header: Header of the model file, with every tensor and its whole shape.
        owned: For each rank, the boxes that it writes. If several ranks hold the same box, only its
            owner lists it. Boxes without elements are ignored.
        writer: Index of the rank that writes all tensors which no rank lists.
        piece_bytes: Largest size of a piece with one digest, in bytes; a multiple of 8.

    Raises:
        MismatchError: An element of a listed tensor belongs to no rank or to several, a box does
            not lie within its tensor, or there is no such tensor. The message names the tensor, the
            elements and the ranks.
    """
    listed: dict[str, list[tuple[int, Box]]] = {}
    for rank, boxes in enumerate(owned):
        for one in boxes:
            if one.name not in header.entries:
                raise MismatchError(
                    f"rank {rank} writes {one.name!r}, which is not among the model's tensors: "
                    "build the same model on every rank"
                )
            shape = header.entries[one.name].shape
            owners = listed.setdefault(one.name, [])
            if one.box.num_elements:
                if not one.box.fits(shape):
                    raise MismatchError(
                        f"rank {rank} writes {one.box.notation()} of {one.name!r}, whose shape is "
                        f"{list(shape)}: build the same model on every rank"
                    )
                owners.append((rank, one.box))
    found: list[list[TensorBox]] = [[] for _ in owned]
    checked: set[tuple[tuple[int, ...], tuple[tuple[int, Box], ...]]] = set()
    for entry in header.entries.values():
        if not entry.nbytes:
            continue
        owners = sorted(listed.get(entry.name, []), key=lambda owner: owner[1])
        if entry.name not in listed:
            owners = [(writer, Box.whole(entry.shape))]
        pattern = entry.shape, tuple(owners)
        if pattern not in checked:  # the layers of a model are usually divided alike
            _require_cover(entry, owners)
            checked.add(pattern)
        for rank, box in owners:
            found[rank].append(TensorBox(entry.name, box))
    return ModelShares(header, tuple(map(tuple, found)), piece_bytes)


def _require_cover(entry: TensorEntry, owners: Sequence[tuple[int, Box]]) -> None:
    for box, ranks in uncovered(entry.shape, owners):
        where = f"{box.notation()} of {entry.name!r} with shape {list(entry.shape)}"
        if not ranks:
            raise MismatchError(
                f"no rank writes {where}: each element of a tensor must belong to one rank"
            )
        raise MismatchError(
            f"ranks {', '.join(map(str, ranks))} all write {where}: boxes may not overlap, and "
            "only one rank may list a box that several ranks hold"
        )


def model_shard(shares: ModelShares, rank: int, owner: int) -> ModelShard:
    """Return the boxes that a rank writes, as those of the shard file of an owner.

    Args:
        shares: Boxes of all ranks.
        rank: Index of the rank.
        owner: Number of the owner that the rank serves.

    Raises:
        MismatchError: The rank writes several boxes of one tensor, and a file has room for one.
    """
    boxes = tuple((one.name, one.box) for one in shares.boxes[rank])
    seen: set[str] = set()
    for name, box in boxes:
        if name in seen:
            raise MismatchError(
                f"rank {rank} writes several boxes of {name!r}, one of them {box.notation()}, and "
                "a shard file has one box of a tensor: shard the parameter in one dimension"
            )
        seen.add(name)
    return ModelShard(owner, boxes)


def shard_share(layout: Layout, *, piece_bytes: int = MODEL_BLOCK_BYTES) -> ModelShare:
    """Return the boxes of a layout's shard file, with their places in the file.

    Args:
        layout: Layout that has a shard file; see `Layout.shard`.
        piece_bytes: Largest size of a piece with one digest, in bytes.
    """
    if layout.shard is None:
        return ModelShare((), piece_bytes)
    header = layout.model_file_header
    shapes = {tensor.name: tensor.shape for tensor in layout.model}
    entries = []
    for name, box in layout.shard.boxes:
        entry = header.entries[name]
        start = header.data_start + entry.start
        entries.append(ShareEntry(name, entry.dtype, Cut(shapes[name], box), start))
        if entry.nbytes != box.num_elements * DTYPE_BYTES[entry.dtype]:
            raise RuntimeError(f"{name!r} has {entry.nbytes} bytes in the header of its shard file")
    return ModelShare(tuple(entries), piece_bytes)
