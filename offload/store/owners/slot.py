"""One part of an owner other than the first, open for writing or as the source of a step.

To the streamer an `OwnerSlot` is what a `Slot` is to it in a store of one process. It has no
manifest and no train state, which belong to the first directory. It has a file with tensors of the
model only if its layout has a shard file.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from enum import Enum

from gds import Backend, File
from gds.contract import Lock
from offload.checkpoint.sealed_slot import SlotFiles
from offload.errors import StoreError
from offload.format._manifest_fields import ScalarValue
from offload.format.digests import DigestContext, KnownLeaves
from offload.format.layout import Layout, array_file_name
from offload.format.names import TABLE_NAME
from offload.format.shares.owners import ModelBox
from offload.format.shares.part_table import OwnerTable, invalid_table
from offload.store.file_identity import has_other_names, ids_in, ids_of
from offload.store.slots.folder import files_in, make_folder, remove_folder, sync_names


class OwnerSlotState(Enum):
    """Stage of the life of an owner's part."""

    FREE = "free"
    """The content is not needed. The next stage is WORKING."""

    WORKING = "working"
    """Steps write the content of one generation; it may be torn. The next stage is REPORTED."""

    REPORTED = "reported"
    """The part is durable and its reference may be in a manifest. The next stage is SEALED if the
    checkpoint was published, WORKING if it was aborted, and ABANDONED if that is not known."""

    SEALED = "sealed"
    """A checkpoint names the part."""

    ABANDONED = "abandoned"
    """A checkpoint may name the part, or its content is unknown. This process never writes it."""


class OwnerSlot(SlotFiles):
    """Open files of an owner's part, and what this process knows about their content.

    Every slot begins as FREE. Only `OwnerStore` calls the methods that change the stage.

    Args:
        backend: Backend of the part.
        directory: Directory of the owner.
        name: Name of the part in that directory.
        layout: Layout of the part.
        files: Open files by name.
    """

    def __init__(
        self, backend: Backend, directory: str, name: str, layout: Layout, files: dict[str, File]
    ) -> None:
        super().__init__(layout, files)
        self._backend = backend
        self._directory = directory
        self._files = files
        self._lock: Lock | None = None
        self._state = OwnerSlotState.FREE
        self.name = name
        self.model_leaves = KnownLeaves(readable=False)
        """Known content of the part's shard file, if it has one."""
        self.is_name_durable = False
        """Whether the name of the part is known to be durable."""

    @property
    def path(self) -> str:
        """Path of the part's directory."""
        return f"{self._directory}/{self.name}"

    @property
    def state(self) -> OwnerSlotState:
        """Stage of the part's life."""
        return self._state

    @property
    def table(self) -> File:
        """The file ``table.json``."""
        return self._files[TABLE_NAME]

    @property
    def document_bytes(self) -> int:
        """Size in bytes of the files that are written as a whole when the part is sealed."""
        return self.table.size_bytes

    @property
    def sizes(self) -> dict[str, int]:
        """Size in bytes of every file, by name."""
        return {name: file.size_bytes for name, file in self._files.items()}

    def hold(self) -> None:
        """Take the shared lock that keeps every process from rewriting the part.

        Raises:
            gds.LockHeldError: Another process is about to rewrite the part.
            StoreError: The directory has been replaced meanwhile.
            gds.StorageError: The directory cannot be locked.
        """
        self._lock = self._backend.lock(self.path, shared=True)
        self.require_in_place()

    def begin_generation(self, context: DigestContext) -> None:
        """Forget the old content: from now on, the part is written as another generation."""
        self._state = OwnerSlotState.WORKING
        self._context = context
        self._digests = {name: [None] * self.layout.num_chunks for name in self.layout.array_names}
        self.trust()

    def opened_sealed(self, table: OwnerTable) -> None:
        """Record that the part, which has just been opened, is that of a checkpoint.

        Its state is compared with its digests when it is read.
        """
        self._state = OwnerSlotState.SEALED
        self._take_digests(table)

    def describe(
        self,
        owner: int,
        scalars: Sequence[tuple[ScalarValue, ...] | None],
        model_boxes: Sequence[ModelBox],
    ) -> OwnerTable:
        """Return the table of the part, with the present digests."""
        return OwnerTable(
            store_id=self.context.store_id,
            generation=self.context.generation,
            owner=owner,
            layout=self.layout,
            scalars=tuple(scalars),
            digests={name: tuple(values) for name, values in self.digests.items()},
            model_boxes=tuple(model_boxes),
        )

    def invalidate(self) -> None:
        """Durably overwrite the table, so that no manifest matches the part.

        Call this before data is written.
        """
        self.table.write_bytes(invalid_table(self.table.size_bytes), 0)
        self.table.sync()

    def write_headers(self) -> None:
        """Write the headers of all state-array files; not synced."""
        for name, header in self.layout.array_headers[0].items():
            self._files[array_file_name(name)].write_bytes(header.encoded, 0)
        if self.layout.shard is not None:
            self.model.write_bytes(self.layout.model_file_header.encoded, 0)

    def seal(self, encoded: bytes) -> None:
        """Make the part's data durable, then its table, then the names of its files.

        The first call also makes the name of the part itself durable.

        Args:
            encoded: Content of the table.

        Raises:
            gds.StorageError: A write or a sync failed.
        """
        for file in self._files.values():
            if file is not self.table:
                file.sync()
        self.table.write_bytes(encoded, 0)
        self.table.sync()
        sync_names(self._backend, self.path, self._files)
        if not self.is_name_durable:
            self._backend.sync_dir(self._directory)
            self.is_name_durable = True

    def reported(self) -> None:
        """Record that the part is durable, so that a manifest may refer to it."""
        self._state = OwnerSlotState.REPORTED

    def published(self) -> None:
        """Record that a durable checkpoint names the part."""
        self._state = OwnerSlotState.SEALED
        self._release_lock()

    def aborted(self) -> None:
        """Record that no checkpoint will ever name the part as it is."""
        self._state = OwnerSlotState.WORKING

    def abandoned(self) -> None:
        """Record that this process must never write the part again, and close its files."""
        self._state = OwnerSlotState.ABANDONED
        self.close()

    def is_in_place(self) -> bool:
        """Return whether the part's directory holds the open files; see `Slot.is_in_place`.

        Raises:
            gds.StorageError: The files cannot be examined at this moment.
        """
        return ids_in(self._backend, self.path, self._files) == ids_of(self._files)

    def require_in_place(self) -> None:
        """Check that what is written to the part is under its name."""
        if not self.is_in_place():
            raise StoreError(
                errno.ESTALE,
                "its files are not those that this process opened: some have been replaced, moved "
                "or removed meanwhile. Leave the files of a store alone until its training has "
                "ended, and start it again",
                self.path,
            )

    def close(self) -> None:
        """Close all files and release the lock. Idempotent."""
        for file in self._files.values():
            file.close()
        self._release_lock()

    def _release_lock(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()


def create_owner_slot(
    backend: Backend, directory: str, name: str, layout: Layout, sizes: Mapping[str, int]
) -> OwnerSlot:
    """Create a part: reserve its space and write its headers. Nothing is durable yet."""
    slot = OwnerSlot(backend, directory, name, layout, {})
    make_folder(backend, slot.path, sizes)
    try:
        for file, size in sizes.items():
            slot._files[file] = backend.create(f"{slot.path}/{file}", size)
        slot.table.write_bytes(invalid_table(slot.table.size_bytes), 0)
        slot.write_headers()
    except BaseException:
        slot.close()
        remove_owner_part(backend, slot.path)
        raise
    return slot


def open_owner_slot(
    backend: Backend, directory: str, name: str, layout: Layout, *, writable: bool
) -> OwnerSlot:
    """Open the files of an existing part."""
    slot = OwnerSlot(backend, directory, name, layout, {})
    try:
        of_model = () if layout.shard is None else (layout.model_name,)
        for file in (*map(array_file_name, layout.array_names), *of_model, TABLE_NAME):
            slot._files[file] = backend.open(f"{slot.path}/{file}", writable=writable)
    except BaseException:
        slot.close()
        raise
    return slot


def fits(backend: Backend, path: str, sizes: Mapping[str, int]) -> bool:
    """Return whether a part has exactly the expected files, none of them with another hard link.

    A part that is marked as damaged has one file more, so it does not fit.

    Args:
        backend: Backend of the part.
        path: Path of the part.
        sizes: Size in bytes of every file, by name.

    Raises:
        gds.StorageError: The part cannot be examined.
    """
    if set(files_in(backend, path)) != set(sizes):
        return False
    for name, size in sizes.items():
        stat = backend.stat(f"{path}/{name}")
        if stat is None or stat.kind != "file" or stat.size_bytes != size:
            return False
    return not has_other_names(backend, path)


def remove_owner_part(backend: Backend, path: str) -> None:
    """Remove a part's directory and the files in it, if the directory exists.

    The table is removed first, so that what an interruption leaves is no sealed part.
    """
    if backend.stat(path) is None:
        return
    remove_folder(backend, path, first=TABLE_NAME)
