"""Files of one slot: the ranges of bytes that have a digest, and which file holds which range.

`SlotFiles` is shared by readers and by the writer of a store, which adds what a writer needs.
`SealedSlot` opens the files of a sealed checkpoint for reading.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Self

from gds import Backend, File
from offload.format.boxes import Box, Cut
from offload.format.digests import MODEL_ARRAY, MODEL_BLOCK_BYTES, DigestContext
from offload.format.layout import Layout, array_file_name
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


class SlotFiles:
    """Open files of one slot and its parts, and the digests of their content.

    Args:
        layout: Layout of the slot.
        files: Open files of the slot's directory, by name.
    """

    def __init__(self, layout: Layout, files: Mapping[str, File]) -> None:
        self.layout = layout
        self.files_by_drive: tuple[Mapping[str, File], ...] = (files,)
        """Open files by name: those of the slot's directory, and those of each part in order."""
        self.context = DigestContext("", 0)
        """Store and generation that the digests are bound to."""
        self.digests: dict[str, list[str | None]] = {}
        """For each state array, the digest of each chunk; None for a chunk that holds no state."""
        self.unchecked = False
        """Whether state must be compared with its digests when it is read: an earlier process wrote
        it, it was restored, or other programs may have changed its files."""

    def has_arrived(self, chunk: int) -> bool:  # noqa: ARG002  (a slot that is being filled)
        """Return whether the files hold a chunk; False while it is on its way from elsewhere."""
        return True

    def wait_arrived(self, chunk: int) -> None:
        """Wait until the files hold a chunk; raises the error of a chunk that will not arrive."""

    def distrust(self) -> None:
        """Require that state is compared with its digests when it is read."""
        self.unchecked = True

    def trust(self) -> None:
        """Allow reads of state without a comparison, because all state is as it was written."""
        self.unchecked = False

    @property
    def model(self) -> File:
        """The file with the slot's tensors of the model; see `Layout.model_name`."""
        return self.files_by_drive[0][self.layout.model_name]

    def array(self, name: str, chunk: int) -> File:
        """Return the file that holds a chunk of a state array."""
        return self.files_by_drive[self.layout.drives[chunk]][array_file_name(name)]

    def state_range(self, array: str, chunk: int) -> SealedRange | None:
        """Return a chunk of a state array with its digest; None if it holds no state."""
        digest, plan = self.digests[array][chunk], self.layout.plans[chunk]
        share = plan.arrays[array]
        if digest is None:
            return None
        return SealedRange(array, chunk, share.offset, share.nbytes, digest, plan.drive)

    def _take_digests(self, sealed: Manifest | OwnerTable) -> None:
        """Use the digests of a checkpoint, with which state is compared when it is read."""
        self.context = DigestContext(sealed.store_id, sealed.generation)
        self.digests = {name: list(digests) for name, digests in sealed.digests.items()}
        self.distrust()


class SealedSlot(SlotFiles):
    """Files of a sealed checkpoint, or of an owner's part of one; a ``with`` block closes them.

    A file is opened when it is first needed, and stays open. So a reader of one parameter needs
    only the drives that hold it.

    Args:
        backend: Storage backend of the checkpoint.
        path: Directory of the checkpoint, or of the part.
        parts: Paths of the checkpoint's parts on other drives, in order.
        sealed: Manifest of the checkpoint, or table of the part.
        tables: Tables of the owners whose boxes of a common model file are wanted, besides those of
            owner 0.
    """

    def __init__(
        self,
        backend: Backend,
        path: str,
        parts: Sequence[str],
        sealed: Manifest | OwnerTable,
        tables: Sequence[OwnerTable] = (),
    ) -> None:
        opened = tuple(_OpenedWhenNeeded(backend, directory) for directory in (path, *parts))
        super().__init__(sealed.layout, opened[0])
        self.files_by_drive = self._opened = opened
        self._take_digests(sealed)
        self._sealed = sealed
        self._tables = tables
        self.path = path

    def file(self, sealed: SealedRange) -> File:
        """Return the file that holds a range.

        Raises:
            gds.StorageError: The file cannot be opened.
        """
        return self.model if sealed.is_of_model else self.array(sealed.array, sealed.index)

    def open_all(self) -> None:
        """Open all tensor files now.

        Raises:
            gds.StorageError: A file cannot be opened.
        """
        for drive, files in enumerate(self._opened):
            for name in self.layout.file_sizes(drive):
                _ = files[name]

    def model_ranges(self) -> Sequence[SealedRange]:
        """Return the blocks, or the pieces of boxes, of `model`, in order."""
        return model_file(self._sealed, self._tables).ranges

    def ranges(self) -> Iterator[SealedRange]:
        """Yield all ranges that have a digest: those of the model, then each state array."""
        yield from self.model_ranges()
        for name, digests in self.digests.items():
            for chunk in range(len(digests)):
                found = self.state_range(name, chunk)
                if found is not None and found.nbytes:
                    yield found

    def close(self) -> None:
        """Close all files. They are opened again if they are needed. Idempotent."""
        for files in self._opened:
            while files:
                files.popitem()[1].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _OpenedWhenNeeded(dict[str, File]):
    """Files of one directory by name, each opened for reading when it is first looked up."""

    def __init__(self, backend: Backend, directory: str) -> None:
        super().__init__()
        self._backend = backend
        self._directory = directory

    def __missing__(self, name: str) -> File:
        self[name] = file = self._backend.open(f"{self._directory}/{name}")
        return file
