"""Division of a checkpoint into the objects of a tier.

The manifest, the model and the train state are one object each, so that people and other libraries
can open them; a model in shard files is one object for each of them. A state array is cut into
objects of whole chunks. The manifest has a digest for every chunk and for every piece of the model,
so an object can be checked, and asked for again, piece by piece.

If several ranks made the checkpoint, each owner of state besides the first has a folder of its own,
with its table and its state. The digests of its chunks, and of the model's boxes that it has
written, are in the table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from offload.checkpoint.sealed_slot import model_file
from offload.errors import CheckpointError
from offload.format.digests import MODEL_BLOCK_BYTES
from offload.format.header import Header
from offload.format.manifest import Manifest
from offload.format.names import (
    MANIFEST_NAME,
    MODEL_NAME,
    SHARD_FOLDER,
    TABLE_NAME,
    TRAIN_STATE_NAME,
    is_shard_name,
    owner_name,
)
from offload.format.shares.part_table import OwnerTable

OBJECT_BYTES: Final = 32 << 20
"""Least size in bytes of an object of state, if there is that much: whole chunks up to it."""

MARKER_NAME: Final = "COMPLETE.json"
"""Name of the object that is written last. Without it, nothing of a copy is offered."""

PARAMETERS_NAME: Final = "PARAMETERS.json"
"""Name of the object that says that the parameters of a copy are complete, and its state is not."""

WRITER_NAME: Final = "WRITER.json"
"""Name of the object that is written first."""

_STATE_NAME = re.compile(r"(owner-[1-9][0-9]{0,8}/)?state/[A-Za-z_][A-Za-z0-9_]{0,63}\.[0-9]{6,}")
_TABLE_NAME = re.compile(r"owner-[1-9][0-9]{0,8}/table\.json")
_SHARD = re.compile(rf"(?:owner-[1-9][0-9]{{0,8}}/)?{SHARD_FOLDER}/([^/]+)")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A range of a file that has a digest: a chunk of a state array, or a piece of the model."""

    array: str
    """Name of the state array. For a piece of the model, `MODEL_ARRAY`, or the name that stands for
    its box; see `ModelBox.digest_array`."""

    index: int
    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class StateObject:
    """One object of state: some consecutive chunks of one array, end to end."""

    name: str

    chunks: tuple[Chunk, ...]

    @property
    def nbytes(self) -> int:
        """Size of the object in bytes."""
        return sum(chunk.nbytes for chunk in self.chunks)

    def starts(self) -> Iterator[tuple[int, Chunk]]:
        """Yield each chunk with its first byte in the object."""
        start = 0
        for chunk in self.chunks:
            yield start, chunk
            start += chunk.nbytes


def folder_of(sealed: Manifest | OwnerTable) -> str:
    """Return the folder of an owner's objects in a copy, with a slash; empty for owner 0."""
    return f"{owner_name(sealed.owner)}/" if isinstance(sealed, OwnerTable) else ""


def table_name(owner: int) -> str:
    """Return the name of the object that has the table of an owner other than the first."""
    return f"{owner_name(owner)}/{TABLE_NAME}"


def state_objects(sealed: Manifest | OwnerTable, object_bytes: int) -> list[StateObject]:
    """Return the objects of an owner's state arrays, in the order of the chunks they begin with.

    Chunks that hold no state are in no object.
    """
    folder = folder_of(sealed)
    found: list[tuple[int, StateObject]] = []
    for array, digests in sealed.digests.items():
        run: list[Chunk] = []
        for index, digest in enumerate((*digests, None)):
            nbytes = 0 if digest is None else sealed.layout.byte_range(array, index)[1]
            is_full = sum(chunk.nbytes for chunk in run) + nbytes > object_bytes
            if run and (not nbytes or is_full):
                name = f"{folder}state/{array}.{run[0].index:06d}"
                found.append((run[0].index, StateObject(name, tuple(run))))
                run = []
            if nbytes and digest is not None:
                run.append(Chunk(array, index, nbytes, digest))
    return [one for _, one in sorted(found, key=lambda pair: pair[0])]


def is_own_name(name: str) -> bool:
    """Return whether this library gives an object of a copy this name."""
    whole = (MARKER_NAME, PARAMETERS_NAME, WRITER_NAME, MANIFEST_NAME, MODEL_NAME, TRAIN_STATE_NAME)
    shard = _SHARD.fullmatch(name)
    return (
        name in whole
        or (shard is not None and is_shard_name(shard[1]))
        or _STATE_NAME.fullmatch(name) is not None
        or _TABLE_NAME.fullmatch(name) is not None
    )


def wrong_sizes(expected: Mapping[str, int], found: Mapping[str, int]) -> list[str]:
    """Return a sentence for each object that is missing or has another size than it should have."""
    return [
        f"{name}: missing, expected {nbytes} bytes"
        if name not in found
        else f"{name}: {found[name]} bytes, expected {nbytes}"
        for name, nbytes in expected.items()
        if found.get(name) != nbytes
    ]


@dataclass(frozen=True, slots=True)
class ModelRun:
    """Consecutive pieces of a file of the model, which are read and sent together."""

    offset: int
    chunks: tuple[Chunk, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(chunk.nbytes for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class ModelObject:
    """One object with tensors of the model: a safetensors file, as it is on the drive."""

    name: str
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
