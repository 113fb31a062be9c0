"""The sealed checkpoint that an upload reads, beside a process that may be training.

An upload holds no lock while it sends. Of the first directory it takes the lock of a reader only
while it reads one part from the drive, and then looks whether the checkpoint is still the same. So
a slow link never keeps a training process from recycling a checkpoint: the upload ends instead.

The part of another owner is not locked at all. Its owner makes the table durably invalid before it
writes the part for another checkpoint, and every chunk is compared with its digest. So if a chunk
is wrong, the table says whether the part was recycled or is damaged.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

from gds import ALIGNMENT, Backend, Buffer, File
from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.owner_parts import OwnerPart, check_cover, read_table_header
from offload.checkpoint.reader_lock import recycled
from offload.checkpoint.sealed_slot import SealedRange, SealedSlot
from offload.checkpoint.second_read import checked
from offload.errors import CheckpointError, DamagedError, RecycledError, StoreError
from offload.format.digests import MODEL_BLOCK_BYTES, DigestContext
from offload.format.manifest import MAX_MANIFEST_BYTES, Manifest, decode
from offload.format.names import MANIFEST_NAME, TABLE_NAME, TRAIN_STATE_NAME
from offload.format.shares.part_table import OwnerTable, decode_table_header
from offload.tiers.contents import (
    Chunk,
    ModelObject,
    StateObject,
    model_object,
    shard_object,
    table_name,
)


class Source:
    """What one owner of state has of a sealed checkpoint, compared with its digests as it is read.

    Args:
        sealed: Manifest of the checkpoint for owner 0, or the table of another owner.
        held: Function that returns a context manager, in which files are read. It raises
            `RecycledError` if they are not those of the checkpoint any more.
    """

    def __init__(
        self,
        backend: Backend,
        sealed: Manifest | OwnerTable,
        model: ModelObject | None,
        documents: Mapping[str, bytes],
        files: SealedSlot,
        held: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self.sealed = sealed
        self.model = model
        self.documents = documents
        self._backend = backend
        self._files = files
        self._held = held
        self._context = DigestContext(sealed.store_id, sealed.generation)

    def read_object(self, wanted: StateObject, into: Buffer) -> memoryview:
        """Read an object of state."""
        with self._held():
            for start, chunk in wanted.starts():
                file = self._files.array(chunk.array, chunk.index)
                piece = into.slice(start, chunk.nbytes)
                offset = self.sealed.layout.byte_range(chunk.array, chunk.index)[0]
                self._read(file, offset, [chunk], piece)
        return into.slice(0, wanted.nbytes).memoryview()

    def model_blocks(self, model: ModelObject, memory: Buffer) -> Iterator[memoryview]:
        """Yield the file of the model in pieces: its header, and then block by block.

        A piece stays as it is as long as anybody refers to it, or to a part of it. Its memory is
        then used again, because new memory costs more time than reading into it. The `memory` of
        the caller is used before any other is allocated.
        """
        yield memoryview(model.header.encoded)
        most = MODEL_BLOCK_BYTES + ALIGNMENT
        free = [memory.slice(number * most, most) for number in range(memory.nbytes // most)]
        for run in model.runs():
            if not free:
                free.append(self._backend.allocate(most, "host"))
            buffer = free.pop()
            block = buffer.slice(run.offset % ALIGNMENT, run.nbytes)
            with self._held():
                self._read(self._files.model, run.offset, run.chunks, block)
            # Parts of a view keep what it was made from, and not the view itself.
            owner = (ctypes.c_ubyte * block.nbytes).from_buffer(block.memoryview())
            weakref.finalize(owner, free.append, buffer).atexit = False
            view = memoryview(owner).cast("B")
            del owner
            yield view
            del view

    def _read(self, file: File, offset: int, chunks: Sequence[Chunk], into: Buffer) -> None:
        """Read chunks that follow each other in a file, and compare each with its digest."""
        file.read(into, offset).result()
        start = 0
        for chunk in chunks:
            at = offset + start
            sealed = SealedRange(chunk.array, chunk.index, at, chunk.nbytes, chunk.digest)
            piece = into.slice(start, chunk.nbytes).memoryview()
            right, _ = checked(file, sealed, piece, self._context)
            if right is not piece:
                piece[:] = right
            start += chunk.nbytes

    def close(self) -> None:
        """Close the files. Idempotent."""
        self._files.close()


def open_first(checkpoint: Checkpoint, owners: Sequence[OwnerPart] = ()) -> Source:
    """Open what the first directory has of a checkpoint, which need not be locked.

    An owner whose part is on another host has no table here, so its digests of the model are
    missing.
    """
    manifest = checkpoint.manifest
    tables: list[OwnerTable] = [one.table for one in owners if one.table is not None]
    if tables and len(tables) == len(manifest.owners):
        check_cover(checkpoint.path, manifest, tables)
    model = model_object(manifest, tables)
    files = checkpoint.open_slot()
    try:
        with checkpoint.held():
            files.open_all()
        documents = _read_documents(checkpoint)
    except BaseException:
        files.close()
        raise
    return Source(checkpoint.backend, manifest, model, documents, files, checkpoint.held)


def _read_documents(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Return the manifest and the train state, as they are on the drive."""
    found = {}
    with checkpoint.held():
        for name in (MANIFEST_NAME, TRAIN_STATE_NAME):
            with checkpoint.backend.open(f"{checkpoint.path}/{name}") as file:
                if file.size_bytes > MAX_MANIFEST_BYTES * 8:
                    raise CheckpointError(f"{file.path}: {file.size_bytes} bytes are too many")
                found[name] = file.read_bytes(0, file.size_bytes)
        checkpoint.read_train_state()  # which checks it
    place = f"{checkpoint.path}/{MANIFEST_NAME}"
    now = decode(found[MANIFEST_NAME].removesuffix(b"\n").rstrip(b" "), place)
    if now.digest != checkpoint.manifest.digest:
        raise RecycledError(
            errno.EAGAIN, "this checkpoint has just been sealed anew; begin again", checkpoint.path
        )
    return found


def open_part(backend: Backend, part: OwnerPart) -> Source:
    """Open the part of an owner besides the first, as it was found on this host."""
    reference, table = part.reference, part.table
    if table is None:
        raise CheckpointError(
            f"{part.path}: the part of owner {reference.owner} is not seen on this host: name the "
            "directories that have the parts of all ranks with --part, or parts="
        )

    def require_present() -> None:
        try:
            found = read_table_header(backend, part.path).digest
        except (CheckpointError, StoreError):
            found = ""
        if found != reference.digest:
            raise recycled(part.path)

    @contextmanager
    def telling_why() -> Iterator[None]:
        """Raise `RecycledError` instead of `DamagedError` if the part was recycled."""
        try:
            yield
        except DamagedError:
            require_present()
            raise

    document = _read_table(backend, f"{part.path}/{TABLE_NAME}", reference.digest)
    if document is None:
        require_present()
        raise DamagedError(
            f"{part.path}/{TABLE_NAME}: damaged: it does not have the digest {reference.digest}"
        )
    model = shard_object(table)
    files = SealedSlot(backend, part.path, (), table)
    try:
        for chunk in range(table.layout.num_chunks):
            for name in table.layout.array_names:
                _ = files.array(name, chunk)  # a part that is removed can still be read
        if model is not None:
            _ = files.model
        require_present()
    except BaseException:
        files.close()
        raise
    documents = {table_name(reference.owner): document}
    return Source(backend, table, model, documents, files, telling_why)


def _read_table(backend: Backend, path: str, digest: str) -> bytes | None:
    """Return a table without the padding of its file; None if it has another digest."""
    try:
        with backend.open(path) as file:
            data = file.read_bytes(0, file.size_bytes).rstrip(b" \n") + b"\n"
        return data if decode_table_header(data, path).digest == digest else None
    except CheckpointError:
        return None


def whole_digest(data: bytes | memoryview) -> str:
    """Return the BLAKE2b digest of an object that the manifest has no digests for."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()
