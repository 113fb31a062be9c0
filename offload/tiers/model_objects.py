"""Objects of a copy that have the model: ``model.safetensors``, or the shard file of each owner.

Every piece of a file of the model has a digest in the manifest, or in the table of the owner that
has written the piece. So an object can be read, sent and checked piece by piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from offload.checkpoint.sealed_ranges import model_file
from offload.errors import CheckpointError
from offload.format.header import Header
from offload.format.manifest import MODEL_BLOCK_BYTES, Manifest
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


def model_object(sealed: Manifest | OwnerTable, tables: Sequence[OwnerTable] = ()) -> ModelObject:
    """Return the object of one directory: the common file, or the shard file of an owner."""
    header = sealed.layout.model_file_header
    name, end = f"{folder_of(sealed)}{sealed.layout.model_name}", header.data_start
    pieces = []
    for one in model_file(sealed, tables).ranges:
        if one.offset != end:
            raise CheckpointError(
                f"{name}: no owner has digests of exactly the bytes {end} to {one.offset}"
            )
        pieces.append((one.offset, Chunk(one.array, one.index, one.nbytes, one.digest)))
        end = one.stop
    if end != header.file_bytes:
        raise CheckpointError(
            f"{name}: no owner has digests of the bytes {end} to {header.file_bytes}"
        )
    return ModelObject(name, header, tuple(pieces))


def shard_object(table: OwnerTable) -> ModelObject | None:
    """Return the object with the shard file of another owner; None if the model is in one file."""
    return None if table.layout.shard is None else model_object(table)


def model_objects(manifest: Manifest, tables: Sequence[OwnerTable]) -> list[ModelObject]:
    """Return all objects of the model, given the tables of all owners besides the first."""
    shards = [shard_object(table) for table in tables]
    return [model_object(manifest, tables), *(shard for shard in shards if shard is not None)]
