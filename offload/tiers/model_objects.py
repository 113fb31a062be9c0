"""Objects of a copy that have the model: ``model.safetensors``, or the shard file of each owner.

Every piece of a file of the model has a digest in the manifest, or in the table of the owner that
has written the piece. So an object can be read, sent and checked piece by piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from offload.checkpoint.sealed_slot import shard_pieces
from offload.errors import CheckpointError
from offload.format.digests import MODEL_ARRAY
from offload.format.header import Header
from offload.format.manifest import MODEL_BLOCK_BYTES, Manifest
from offload.format.shares.owners import MODEL_PIECE_BYTES, ModelBox
from offload.format.shares.part_table import OwnerTable
from offload.tiers.contents import Chunk, folder_of


@dataclass(frozen=True, slots=True)
class ModelRun:
    """Consecutive pieces of a file of the model, which are read and sent together."""

    offset: int
    """First byte in the file."""

    chunks: tuple[Chunk, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(chunk.nbytes for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class ModelObject:
    """One object with tensors of the model: a safetensors file, as it is on the drive."""

    name: str
    """Name of the object, relative to its copy."""

    header: Header
    """Header of the file, whose digest is that of its content."""

    pieces: tuple[tuple[int, Chunk], ...]
    """Pieces that have a digest, each with its first byte in the file. They are in the order of the
    file, and follow each other from the end of the header without a gap."""

    @property
    def nbytes(self) -> int:
        """Size of the object in bytes."""
        return self.header.file_bytes

    def runs(self) -> Iterator[ModelRun]:
        """Yield the pieces in runs of at most `MODEL_BLOCK_BYTES`."""
        run: list[Chunk] = []
        begin = nbytes = 0
        for offset, chunk in self.pieces:
            if run and nbytes + chunk.nbytes > MODEL_BLOCK_BYTES:
                yield ModelRun(begin, tuple(run))
                run = []
            if not run:
                begin, nbytes = offset, 0
            run.append(chunk)
            nbytes += chunk.nbytes
        if run:
            yield ModelRun(begin, tuple(run))


def model_object(manifest: Manifest, tables: Sequence[OwnerTable] = ()) -> ModelObject:
    """Return the object of the first directory: the common file, or the shard file of owner 0."""
    layout = manifest.layout
    if layout.shard is not None:
        return _shard(manifest)
    header = layout.model_header
    pieces: list[tuple[int, Chunk]] = []
    data_bytes = header.file_bytes - header.data_start
    for block, digest in enumerate(manifest.model_digests):
        start = block * MODEL_BLOCK_BYTES
        nbytes = min(MODEL_BLOCK_BYTES, data_bytes - start)
        pieces.append((header.data_start + start, Chunk(MODEL_ARRAY, block, nbytes, digest)))
    if manifest.owners:
        boxes = [*manifest.model_boxes, *(box for table in tables for box in table.model_boxes)]
        pieces = _in_order(layout.model_name, header, _box_pieces(manifest, boxes))
    return ModelObject(layout.model_name, header, tuple(pieces))


def shard_object(table: OwnerTable) -> ModelObject | None:
    """Return the object with the shard file of another owner; None if the model is in one file."""
    return None if table.layout.shard is None else _shard(table)


def model_objects(manifest: Manifest, tables: Sequence[OwnerTable]) -> list[ModelObject]:
    """Return all objects of the model, given the tables of all owners besides the first."""
    shards = [shard_object(table) for table in tables]
    return [model_object(manifest, tables), *(shard for shard in shards if shard is not None)]


def _shard(sealed: Manifest | OwnerTable) -> ModelObject:
    layout = sealed.layout
    pieces = (
        (one.offset, Chunk(one.array, one.index, one.nbytes, one.digest))
        for box in sealed.model_boxes
        for one in shard_pieces(layout, box)
    )
    name, header = f"{folder_of(sealed)}{layout.model_name}", layout.model_file_header
    return ModelObject(name, header, tuple(_in_order(name, header, pieces)))


def _box_pieces(manifest: Manifest, boxes: Iterable[ModelBox]) -> Iterator[tuple[int, Chunk]]:
    header = manifest.layout.model_header
    tensors = {tensor.name: tensor for tensor in manifest.layout.model}
    for box in boxes:
        first, last = box.byte_range(tensors[box.name])
        at = header.data_start + header.entries[box.name].start
        for piece, digest in enumerate(box.digests):
            start = first + piece * MODEL_PIECE_BYTES
            nbytes = min(MODEL_PIECE_BYTES, last - start)
            if nbytes:
                yield at + start, Chunk(box.digest_array, piece, nbytes, digest)


def _in_order(
    name: str, header: Header, pieces: Iterable[tuple[int, Chunk]]
) -> list[tuple[int, Chunk]]:
    """Return pieces in the order of their file."""
    found = sorted(pieces, key=lambda pair: pair[0])
    end = header.data_start
    for offset, chunk in found:
        if offset != end:
            raise CheckpointError(
                f"{name}: no owner has digests of exactly the bytes {end} to {offset}"
            )
        end = offset + chunk.nbytes
    if end != header.file_bytes:
        raise CheckpointError(
            f"{name}: no owner has digests of the bytes {end} to {header.file_bytes}"
        )
    return found
