"""The part of an owner of state that an upload reads, beside a process that may be training.

Nothing is locked. An owner makes the table of a part durably invalid before it writes the part for
another checkpoint, and every chunk is compared with its digest. So if a chunk is wrong, the table
says whether the part was recycled or is damaged.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gds import Backend, Buffer
from offload.checkpoint.owner_parts import OwnerPart, read_table_header
from offload.checkpoint.reader_lock import recycled
from offload.checkpoint.sealed_slot import SealedSlot
from offload.errors import CheckpointError, DamagedError, StoreError
from offload.format.digests import DigestContext
from offload.format.names import TABLE_NAME
from offload.format.shares.part_table import OwnerTable, decode_table_header
from offload.tiers.contents import StateObject, file_offset
from offload.tiers.model_objects import ModelObject, shard_object
from offload.tiers.source import read_chunks, read_model


class OwnerSource:
    """Reads the part of an owner other than the first, and compares it with its digests.

    Args:
        backend: Backend of the part.
        part: The part, as it was found on this host.

    Raises:
        CheckpointError: The part is not seen here.
        RecycledError: The part was recycled.
        gds.StorageError: A file cannot be opened.
    """

    def __init__(self, backend: Backend, part: OwnerPart) -> None:
        if part.table is None:
            raise CheckpointError(
                f"{part.path}: the part of owner {part.reference.owner} is not seen on this host: "
                "name the directories that have the parts of all ranks with --part, or parts="
            )
        self.owner = part.reference.owner
        self.table: OwnerTable = part.table
        """Description of the part."""
        self.model: ModelObject | None = shard_object(part.table)
        """Object of the owner's shard file of the model; None if the model is in one file."""
        self._backend = backend
        self._path = part.path
        self._digest = part.reference.digest
        self.document = self._read_table()
        """Content of the object that has the table; without the padding of the file."""
        self._context = DigestContext(part.table.store_id, part.table.generation)
        self._files = SealedSlot(backend, part.path, (), part.table)
        try:
            for chunk in range(self.table.layout.num_chunks):
                for name in self.table.layout.array_names:
                    _ = self._files.array(name, chunk)  # a part that is removed can still be read
            if self.model is not None:
                _ = self._files.model
            self.require_present()
        except BaseException:
            self._files.close()
            raise

    def _read_table(self) -> bytes:
        path = f"{self._path}/{TABLE_NAME}"
        try:
            with self._backend.open(path) as file:
                data = file.read_bytes(0, file.size_bytes).rstrip(b" \n") + b"\n"
            if decode_table_header(data, path).digest == self._digest:
                return data
        except CheckpointError:
            pass
        self.require_present()
        raise DamagedError(f"{path}: damaged: it does not have the digest {self._digest}")

    def require_present(self) -> None:
        """Check that the part still is that of the checkpoint."""
        try:
            found = read_table_header(self._backend, self._path).digest
        except (CheckpointError, StoreError):
            found = ""
        if found != self._digest:
            raise recycled(self._path)

    def read_object(self, wanted: StateObject, into: Buffer) -> memoryview:
        """Read an object of state."""
        layout = self.table.layout
        with self._telling_why():
            for start, chunk in wanted.starts():
                file = self._files.array(chunk.array, chunk.index)
                piece = into.slice(start, chunk.nbytes)
                read_chunks(file, file_offset(layout, chunk), [chunk], piece, self._context)
        return into.slice(0, wanted.nbytes).memoryview()

    def model_blocks(self, model: ModelObject, memory: Buffer) -> Iterator[memoryview]:
        """Yield the shard file in pieces; see `read_model`, with the errors of `read_object`.

        Args:
            model: The object `model`.
            memory: Memory to use before any other is allocated; of any size.
        """
        file = self._files.model
        return read_model(model, file, self._backend, self._context, self._telling_why, memory)

    @contextmanager
    def _telling_why(self) -> Iterator[None]:
        """Raise `RecycledError` instead of `DamagedError` in a block if the part was recycled."""
        try:
            yield
        except DamagedError:
            self.require_present()
            raise

    def close(self) -> None:
        """Close the files. Idempotent."""
        self._files.close()
