"""Ranges of bytes that have a digest, and the files of a model that consist of such ranges."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from offload.format.boxes import Box, Cut
from offload.format.digests import MODEL_ARRAY, MODEL_BLOCK_BYTES
from offload.format.layout import Layout
from offload.format.manifest import Manifest
from offload.format.shares.model_shares import ShareEntry, shard_share
from offload.format.shares.owners import ModelBox
from offload.format.shares.part_table import OwnerTable


@dataclass(frozen=True, slots=True)
class SealedRange:
    """A range of bytes that has a digest."""

    array: str
    """Name of the state array; `MODEL_ARRAY`, or a name that begins with it, for the model."""

    index: int
    """Index of the chunk, block or piece."""

    offset: int
    """First byte in the file."""

    nbytes: int
    """Length in bytes."""

    digest: str
    """Digest that the bytes were sealed with."""

    drive: int = 0
    """Position of the drive among those of the store."""

    @property
    def stop(self) -> int:
        """One past the last byte in the file."""
        return self.offset + self.nbytes

    @property
    def is_of_model(self) -> bool:
        """Whether the range is in a file of the model, and not in one of the state."""
        # The array of a box of the model is "model/<box>"; no state array has such a name.
        return self.array.partition("/")[0] == MODEL_ARRAY


@dataclass(frozen=True)
class ModelFile:
    """A file with tensors of a model, or with boxes of tensors."""

    entries: Sequence[ShareEntry]
    """Boxes in the file that have elements, in the order of their bytes. They do not overlap."""

    ranges: Sequence[SealedRange]
    """Ranges of the file that have a digest, in the order of their bytes. A range may be a part of
    one box, or have bytes of several tensors."""

    @cached_property
    def by_name(self) -> dict[str, list[ShareEntry]]:
        """Boxes of each tensor."""
        found: dict[str, list[ShareEntry]] = {}
        for entry in self.entries:
            found.setdefault(entry.name, []).append(entry)
        return found

    @cached_property
    def _offsets(self) -> list[int]:
        return [one.offset for one in self.ranges]

    @cached_property
    def _starts(self) -> list[int]:
        return [entry.start for entry in self.entries]

    def entries_in(self, start: int, stop: int) -> Sequence[ShareEntry]:
        """Return the boxes that have any of the bytes `start` to `stop`."""
        first = max(bisect_right(self._starts, start) - 1, 0)
        found = self.entries[first : bisect_left(self._starts, stop)]
        return [entry for entry in found if start < entry.start + entry.nbytes]

    def ranges_with(self, start: int, stop: int) -> range:
        """Return the positions in `ranges` of those that have the bytes `start` to `stop`.

        Raises:
            LookupError: A byte has no digest; names it.
        """
        first = last = bisect_right(self._offsets, start) - 1
        while start < stop:
            if not 0 <= last < len(self.ranges) or not (
                self.ranges[last].offset <= start < self.ranges[last].stop
            ):
                raise LookupError(f"byte {start} of the model has no digest")
            start = self.ranges[last].stop
            last += 1
        return range(first, last)


def model_file(sealed: Manifest | OwnerTable, tables: Sequence[OwnerTable] = ()) -> ModelFile:
    """Return the model file in the directory of an owner; it is empty if there is none.

    Args:
        sealed: Manifest of the checkpoint for owner 0, and otherwise the table of the part.
        tables: Tables of the further owners whose boxes of a common file have digests here.
    """
    if sealed.layout.shard is not None:
        entries = shard_share(sealed.layout).entries
        starts = {entry.name: entry.start for entry in entries}
        boxes = [(starts.get(box.name, 0), box) for box in sealed.model_boxes]
        return ModelFile(entries, _in_order(sealed.layout, boxes))
    if isinstance(sealed, OwnerTable):
        return ModelFile((), ())
    header = sealed.layout.model_header
    places = {entry.name: header.data_start + entry.start for entry in header.entries.values()}
    entries = tuple(
        ShareEntry(one.name, one.dtype, Cut(one.shape, Box.whole(one.shape)), places[one.name])
        for one in header.entries.values()
        if one.nbytes
    )
    tensors = {tensor.name: tensor for tensor in sealed.layout.model}
    boxes = [
        (places[box.name] + box.byte_range(tensors[box.name])[0], box)
        for box in chain(sealed.model_boxes, *(table.model_boxes for table in tables))
    ]
    return ModelFile(entries, [*_blocks(sealed), *_in_order(sealed.layout, boxes)])


def _blocks(manifest: Manifest) -> Iterator[SealedRange]:
    """Yield the blocks of a file that one process has written."""
    header = manifest.layout.model_header
    for block, digest in enumerate(manifest.model_digests):
        start = header.data_start + block * MODEL_BLOCK_BYTES
        nbytes = min(MODEL_BLOCK_BYTES, header.file_bytes - start)
        yield SealedRange(MODEL_ARRAY, block, start, nbytes, digest)


def _in_order(layout: Layout, boxes: Iterable[tuple[int, ModelBox]]) -> list[SealedRange]:
    """Return the pieces of boxes, each of which begins at the given byte, in their order."""
    tensors = {tensor.name: tensor for tensor in layout.model}
    found = []
    for start, box in boxes:
        nbytes = box.num_bytes(tensors[box.name])
        for piece, digest in enumerate(box.digests):
            first = piece * MODEL_BLOCK_BYTES
            num = min(MODEL_BLOCK_BYTES, nbytes - first)
            found.append(SealedRange(box.digest_array, piece, start + first, num, digest))
    return sorted(found, key=lambda one: one.offset)
