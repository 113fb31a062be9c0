"""The sealed checkpoint that an upload reads, beside a process that may be training.

An upload holds no lock while it sends. It takes the lock of a reader only while it reads one part
from the drive, and then looks whether the checkpoint is still the same. So a slow link never keeps
a training process from recycling a checkpoint: the upload ends instead.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from gds import ALIGNMENT, Backend, Buffer, File
from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.owner_parts import OwnerPart, check_cover
from offload.checkpoint.sealed_ranges import SealedRange
from offload.checkpoint.sealed_slot import SealedSlot
from offload.checkpoint.second_read import checked
from offload.errors import CheckpointError, RecycledError
from offload.format.digests import DigestContext
from offload.format.manifest import MAX_MANIFEST_BYTES, MODEL_BLOCK_BYTES, decode
from offload.format.names import MANIFEST_NAME, TRAIN_STATE_NAME
from offload.format.shares.part_table import OwnerTable
from offload.tiers.contents import Chunk, StateObject, file_offset
from offload.tiers.model_objects import ModelObject, model_object


class Documents(NamedTuple):
    """The small files of a checkpoint, as they are on the drive."""

    manifest: bytes
    train_state: bytes


class Source:
    """Reads parts of a sealed checkpoint, and compares them with their digests.

    Args:
        checkpoint: Checkpoint to read. It need not be locked.
        owners: Parts of its owners of state besides the first. Those on other hosts have no table
            here, and none of the model's digests.

    Raises:
        CheckpointError: The tables do not describe all of the checkpoint.
    """

    def __init__(self, checkpoint: Checkpoint, owners: Sequence[OwnerPart] = ()) -> None:
        tables: list[OwnerTable] = [one.table for one in owners if one.table is not None]
        if tables and len(tables) == len(checkpoint.manifest.owners):
            check_cover(checkpoint.path, checkpoint.manifest, tables)
        self.model: ModelObject = model_object(checkpoint.manifest, tables)
        """Object of the model that the first directory has."""
        self._checkpoint = checkpoint
        self._manifest = checkpoint.manifest
        self._context = DigestContext(self._manifest.store_id, self._manifest.generation)
        self._slot: SealedSlot = checkpoint.open_slot()
        with checkpoint.held():
            self._slot.open_all()

    def documents(self) -> Documents:
        """Read the manifest and the train state."""
        checkpoint = self._checkpoint
        with checkpoint.held():
            found = Documents(*(self._read_whole(n) for n in (MANIFEST_NAME, TRAIN_STATE_NAME)))
            checkpoint.read_train_state()  # which checks it
        place = f"{checkpoint.path}/{MANIFEST_NAME}"
        now = decode(found.manifest.removesuffix(b"\n").rstrip(b" "), place)
        if now.digest != self._manifest.digest:
            raise RecycledError(
                errno.EAGAIN,
                "this checkpoint has just been sealed anew; begin again",
                checkpoint.path,
            )
        return found

    def _read_whole(self, name: str) -> bytes:
        with self._checkpoint.backend.open(f"{self._checkpoint.path}/{name}") as file:
            if file.size_bytes > MAX_MANIFEST_BYTES * 8:
                raise CheckpointError(f"{file.path}: {file.size_bytes} bytes are too many")
            return file.read_bytes(0, file.size_bytes)

    def read_object(self, wanted: StateObject, into: Buffer) -> memoryview:
        """Read an object of state."""
        layout = self._manifest.layout
        with self._checkpoint.held():
            for start, chunk in wanted.starts():
                file = self._slot.array(chunk.array, chunk.index)
                piece = into.slice(start, chunk.nbytes)
                read_chunks(file, file_offset(layout, chunk), [chunk], piece, self._context)
        return into.slice(0, wanted.nbytes).memoryview()

    def model_blocks(self, memory: Buffer) -> Iterator[memoryview]:
        """Yield the file of `model` in pieces; see `read_model`. Errors are as in `read_object`.

        Args:
            memory: Memory to use before any other is allocated; of any size.
        """
        checkpoint, file = self._checkpoint, self._slot.model
        return read_model(
            self.model, file, checkpoint.backend, self._context, checkpoint.held, memory
        )

    def close(self) -> None:
        """Close the files. Idempotent."""
        self._slot.close()


def read_chunks(
    file: File, offset: int, chunks: Sequence[Chunk], into: Buffer, context: DigestContext
) -> None:
    """Read chunks that follow each other in a file, and compare each with its digest."""
    file.read(into, offset).result()
    start = 0
    for chunk in chunks:
        sealed = SealedRange(chunk.array, chunk.index, offset + start, chunk.nbytes, chunk.digest)
        piece = into.slice(start, chunk.nbytes).memoryview()
        right, _ = checked(file, sealed, piece, context)
        if right is not piece:
            piece[:] = right
        start += chunk.nbytes


def read_model(
    model: ModelObject,
    file: File,
    backend: Backend,
    context: DigestContext,
    held: Callable[[], AbstractContextManager[object]],
    memory: Buffer,
) -> Iterator[memoryview]:
    """Yield a file of the model in pieces: its header, and then block by block.

    A piece stays as it is as long as anybody refers to it, or to a part of it. Its memory is then
    used again, because new memory costs more time than reading into it. Pieces in the memory of the
    caller last until the caller uses it for something else. The file is not closed: that is for its
    owner, also if the caller takes only some of the pieces.

    Args:
        model: What the file is in the copy.
        file: File to read.
        backend: Backend that memory is allocated with.
        context: Store and generation that the digests are bound to.
        held: Function that returns a context manager, in which each block is read.
        memory: Memory to use before any other is allocated; of any size.

    Raises the errors of `read_chunks`.
    """
    yield memoryview(model.header.encoded)
    most = MODEL_BLOCK_BYTES + ALIGNMENT
    free = [memory.slice(number * most, most) for number in range(memory.nbytes // most)]
    for run in model.runs():
        if not free:
            free.append(backend.allocate(most, "host"))
        buffer = free.pop()
        block = buffer.slice(run.offset % ALIGNMENT, run.nbytes)
        with held():
            read_chunks(file, run.offset, run.chunks, block, context)
        # Parts of a view keep what it was made from, and not the view itself.
        owner = (ctypes.c_ubyte * block.nbytes).from_buffer(block.memoryview())
        weakref.finalize(owner, free.append, buffer).atexit = False
        view = memoryview(owner).cast("B")
        del owner
        yield view
        del view


def whole_digest(data: bytes | memoryview) -> str:
    """Return the BLAKE2b digest of an object that the manifest has no digests for."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()
