"""Files of one slot: which file holds which chunk, and the digest that its content must have.

`SlotFiles` is shared by readers and by the writer of a store, which adds what a writer needs.
`SealedSlot` opens the files of a sealed checkpoint for reading.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from gds import Backend, File
from offload.format.digests import MODEL_ARRAY, DigestContext
from offload.format.layout import Layout, array_file_name
from offload.format.manifest import MODEL_BLOCK_BYTES, Manifest
from offload.format.shares.owners import MODEL_PIECE_BYTES, ModelBox
from offload.format.shares.part_table import OwnerTable


class SlotFiles:
    """Open files of one slot and its parts, and the digests of their content.

    Args:
        layout: Layout of the slot.
        files: Open files of the slot's directory, by name.
    """

    def __init__(self, layout: Layout, files: Mapping[str, File]) -> None:
        self.layout = layout
        self._files_by_drive: tuple[Mapping[str, File], ...] = (files,)
        """Open files by name: those of the slot's directory, and those of each part in order."""
        self._context = DigestContext("", 0)
        self._digests: dict[str, list[str | None]] = {}
        self._is_unchecked = False

    @property
    def context(self) -> DigestContext:
        """Store and generation that the digests are bound to."""
        return self._context

    @property
    def digests(self) -> dict[str, list[str | None]]:
        """For each state array, the digest of each chunk; None for a chunk that holds no state."""
        return self._digests

    @property
    def unchecked(self) -> bool:
        """Whether state must be compared with its digests when it is read.

        The comparison is needed if an earlier process wrote the state, if the state was restored,
        or if other programs may have changed its files.
        """
        return self._is_unchecked

    def has_arrived(self, chunk: int) -> bool:  # noqa: ARG002  (a slot that is being filled)
        """Return whether the files hold a chunk; False while it is on its way from elsewhere."""
        return True

    def wait_arrived(self, chunk: int) -> None:
        """Wait until the files hold a chunk; raises the error of a chunk that will not arrive."""

    def distrust(self) -> None:
        """Require that state is compared with its digests when it is read."""
        self._is_unchecked = True

    def trust(self) -> None:
        """Allow reads of state without a comparison, because all state is as it was written."""
        self._is_unchecked = False

    @property
    def model(self) -> File:
        """The file with the slot's tensors of the model; see `Layout.model_name`."""
        return self._files_by_drive[0][self.layout.model_name]

    def array(self, name: str, chunk: int) -> File:
        """Return the file that holds a chunk of a state array."""
        return self._files_by_drive[self.layout.drives[chunk]][array_file_name(name)]

    def files_of(self, chunk: int) -> Mapping[str, File]:
        """Return the files on the drive of a chunk, by name; see `ArrayShare.file_name`."""
        return self._files_by_drive[self.layout.plans[chunk].drive]

    def _state_ranges(self) -> Iterator[SealedRange]:
        """Yield the chunks of each state array that have a digest."""
        for name, digests in self._digests.items():
            for chunk, digest in enumerate(digests):
                offset, nbytes = self.layout.byte_range(name, chunk)
                if digest is not None and nbytes:
                    drive = self.layout.drives[chunk]
                    yield SealedRange(name, chunk, offset, nbytes, digest, drive)

    def _take_digests(self, sealed: Manifest | OwnerTable) -> None:
        """Use the digests of a checkpoint, with which state is compared when it is read."""
        self._context = DigestContext(sealed.store_id, sealed.generation)
        self._digests = {name: list(digests) for name, digests in sealed.digests.items()}
        self.distrust()


@dataclass(frozen=True, slots=True)
class SealedRange:
    """A range of bytes that has a digest."""

    array: str
    """Name of the state array; `MODEL_ARRAY` for a block of ``model.safetensors``."""

    index: int
    """Index of the chunk or block."""

    offset: int
    """First byte in the file."""

    nbytes: int
    """Length in bytes."""

    digest: str
    """Digest that the bytes were sealed with."""

    drive: int
    """Position of the drive among those of the store."""


class _SealedFiles(SlotFiles):
    """Files for reading, each opened when it is first needed; a ``with`` block closes them."""

    _opened: tuple[_OpenedWhenNeeded, ...]

    def file(self, sealed: SealedRange) -> File:
        """Return the file that holds a range.

        Raises:
            gds.StorageError: The file cannot be opened.
        """
        return self.model if _is_of_model(sealed) else self.array(sealed.array, sealed.index)

    def close(self) -> None:
        """Close all files. Idempotent."""
        for files in self._opened:
            for file in files.values():
                file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class SealedSlot(_SealedFiles):
    """Files of a sealed checkpoint, for reading; a ``with`` block closes them at its end.

    A file is opened when it is first needed, and stays open. So a reader of one parameter needs
    only the drives that hold it.

    Args:
        backend: Storage backend of the checkpoint.
        path: Directory of the checkpoint.
        parts: Paths of the checkpoint's parts on other drives, in order.
        manifest: Manifest of the checkpoint.
        tables: Tables of the owners whose boxes of the model are wanted, besides those of owner 0.
    """

    def __init__(
        self,
        backend: Backend,
        path: str,
        parts: Sequence[str],
        manifest: Manifest,
        tables: Sequence[OwnerTable] = (),
    ) -> None:
        files_by_drive = tuple(
            _OpenedWhenNeeded(backend, directory) for directory in (path, *parts)
        )
        super().__init__(manifest.layout, files_by_drive[0])
        self._files_by_drive = self._opened = files_by_drive
        self._take_digests(manifest)
        self._manifest = manifest
        self._tables = tables

    def open_all(self) -> None:
        """Open all tensor files now.

        Raises:
            gds.StorageError: A file cannot be opened.
        """
        for drive, files in enumerate(self._opened):
            for name in self.layout.file_sizes(drive):
                _ = files[name]

    def model_ranges(self) -> Iterator[SealedRange]:
        """Yield the blocks, or the boxes, of the data of `model`, in order."""
        if self.layout.shard is not None:
            for box in self._manifest.model_boxes:
                yield from shard_pieces(self.layout, box)
            return
        header = self.layout.model_header
        data_bytes = header.file_bytes - header.data_start
        for block, digest in enumerate(self._manifest.model_digests):
            start = block * MODEL_BLOCK_BYTES
            nbytes = min(MODEL_BLOCK_BYTES, data_bytes - start)
            yield SealedRange(MODEL_ARRAY, block, header.data_start + start, nbytes, digest, 0)
        yield from self._box_ranges(self._manifest.model_boxes)
        for table in self._tables:
            yield from self._box_ranges(table.model_boxes)

    def _box_ranges(self, boxes: Iterable[ModelBox]) -> Iterator[SealedRange]:
        header = self.layout.model_header
        tensors = {tensor.name: tensor for tensor in self.layout.model}
        for box in boxes:
            at = header.data_start + header.entries[box.name].start
            first, last = box.byte_range(tensors[box.name])
            for piece, digest in enumerate(box.digests):
                start = first + piece * MODEL_PIECE_BYTES
                nbytes = min(MODEL_PIECE_BYTES, last - start)
                yield SealedRange(box.digest_array, piece, at + start, nbytes, digest, 0)

    def ranges(self) -> Iterator[SealedRange]:
        """Yield all ranges that have a digest: the blocks of the model, then each state array."""
        yield from self.model_ranges()
        yield from self._state_ranges()


class SealedOwner(_SealedFiles):
    """Files of an owner's part of a sealed checkpoint, for reading; see `SealedSlot`.

    Args:
        backend: Storage backend of the part.
        path: Directory of the part.
        table: Table of the part.
    """

    def __init__(self, backend: Backend, path: str, table: OwnerTable) -> None:
        self.path = path
        opened = _OpenedWhenNeeded(backend, path)
        super().__init__(table.layout, opened)
        self._opened = (opened,)
        self._take_digests(table)
        self._model_boxes = table.model_boxes

    def ranges(self) -> Iterator[SealedRange]:
        """Yield all ranges that have a digest: those of the shard file, then the state."""
        if self.layout.shard is not None:
            for box in self._model_boxes:
                yield from shard_pieces(self.layout, box)
        yield from self._state_ranges()


def _is_of_model(sealed: SealedRange) -> bool:
    # The array of a box of the model is named "model/<box>"; no state array has such a name.
    return sealed.array.partition("/")[0] == MODEL_ARRAY


def shard_pieces(layout: Layout, box: ModelBox) -> Iterator[SealedRange]:
    """Yield the ranges of a layout's shard file that have the digests of a box, in order."""
    header = layout.model_file_header
    entry = header.entries[box.name]
    for piece, digest in enumerate(box.digests):
        start = piece * MODEL_PIECE_BYTES
        nbytes = min(MODEL_PIECE_BYTES, entry.nbytes - start)
        at = header.data_start + entry.start + start
        yield SealedRange(box.digest_array, piece, at, nbytes, digest, 0)


class _OpenedWhenNeeded(dict[str, File]):
    """Files of one directory by name, each opened for reading when it is first looked up."""

    def __init__(self, backend: Backend, directory: str) -> None:
        super().__init__()
        self._backend = backend
        self._directory = directory

    def __missing__(self, name: str) -> File:
        self[name] = file = self._backend.open(f"{self._directory}/{name}")
        return file
