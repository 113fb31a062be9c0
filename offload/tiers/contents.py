"""Division of a checkpoint into the objects of a tier.

The manifest, the model and the train state are one object each, so that people and other libraries
can open them. A state array is cut into objects of whole chunks. The manifest has a digest for
every chunk and for every block of the model, so an object can be checked, and asked for again, by
itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from offload.format.digests import MODEL_ARRAY
from offload.format.layout import Layout
from offload.format.manifest import MODEL_BLOCK_BYTES, Manifest
from offload.format.names import MANIFEST_NAME, MODEL_NAME, TRAIN_STATE_NAME

OBJECT_BYTES: Final = 32 << 20
"""Least size in bytes of an object of state, if there is that much: whole chunks up to it."""

MARKER_NAME: Final = "COMPLETE.json"
"""Name of the object that is written last. Without it, nothing of a copy is offered."""

WRITER_NAME: Final = "WRITER.json"
"""Name of the object that is written first."""

_STATE_NAME = re.compile(r"state/[A-Za-z_][A-Za-z0-9_]{0,63}\.[0-9]{6,}")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A range of a file that has a digest: a chunk of a state array, or a block of the model."""

    array: str
    """Name of the state array; `MODEL_ARRAY` for a block of ``model.safetensors``."""

    index: int
    """Index of the chunk or block."""

    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class StateObject:
    """One object of state: some consecutive chunks of one array, end to end."""

    name: str
    """Name of the object, relative to its copy."""

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


def state_objects(manifest: Manifest, object_bytes: int) -> list[StateObject]:
    """Return the objects of all state arrays, in the order of the chunks that they begin with.

    Chunks that hold no state are in no object.

    Args:
        manifest: Manifest of the checkpoint.
        object_bytes: Size in bytes from which on no further chunk is added to an object.
    """
    found: list[tuple[int, StateObject]] = []
    for array, digests in manifest.digests.items():
        run: list[Chunk] = []
        for index, digest in enumerate((*digests, None)):
            nbytes = 0 if digest is None else manifest.layout.byte_range(array, index)[1]
            is_full = sum(chunk.nbytes for chunk in run) + nbytes > object_bytes
            if run and (not nbytes or is_full):
                name = f"state/{array}.{run[0].index:06d}"
                found.append((run[0].index, StateObject(name, tuple(run))))
                run = []
            if nbytes and digest is not None:
                run.append(Chunk(array, index, nbytes, digest))
    return [one for _, one in sorted(found, key=lambda pair: pair[0])]


def model_chunks(manifest: Manifest) -> Iterator[tuple[int, Chunk]]:
    """Yield the blocks of ``model.safetensors``, each with its first byte in the file."""
    header = manifest.layout.model_header
    data_bytes = header.file_bytes - header.data_start
    for block, digest in enumerate(manifest.model_digests):
        start = block * MODEL_BLOCK_BYTES
        nbytes = min(MODEL_BLOCK_BYTES, data_bytes - start)
        yield header.data_start + start, Chunk(MODEL_ARRAY, block, nbytes, digest)


def file_offset(layout: Layout, chunk: Chunk) -> int:
    """Return the first byte of a chunk of state in its file."""
    return layout.byte_range(chunk.array, chunk.index)[0]


def is_own_name(name: str) -> bool:
    """Return whether this library gives an object of a copy this name."""
    whole = (MARKER_NAME, WRITER_NAME, MANIFEST_NAME, MODEL_NAME, TRAIN_STATE_NAME)
    return name in whole or _STATE_NAME.fullmatch(name) is not None


def wrong_sizes(expected: Mapping[str, int], found: Mapping[str, int]) -> list[str]:
    """Return a sentence for each object that is missing or has another size than it should have."""
    return [
        f"{name}: missing, expected {nbytes} bytes"
        if name not in found
        else f"{name}: {found[name]} bytes, expected {nbytes}"
        for name, nbytes in expected.items()
        if found.get(name) != nbytes
    ]


def foreign_names(found: Iterable[str], expected: Sequence[str]) -> list[str]:
    """Return the names of a copy's objects that this library has not written there."""
    return sorted({*found} - {*expected, MARKER_NAME, WRITER_NAME})
