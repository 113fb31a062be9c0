"""Slots with open files, as their only writer has them, and the stages of their life.

`Slot` is a slot of a store: a whole checkpoint, or its first directory's share. On a store of
several drives it has a part on each of the others. `OwnerSlot` is the part of an owner other than
the first. To whoever steps, both are an `OpenSlot`.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from enum import Enum
from typing import ClassVar

from gds import Backend, File, StorageError
from gds.waiting import Monitor
from offload.checkpoint.sealed_slot import SlotFiles
from offload.errors import StoreError
from offload.format.digests import DigestContext, KnownLeaves
from offload.format.layout import Layout
from offload.format.manifest import Manifest
from offload.format.names import MANIFEST_NAME, TRAIN_STATE_NAME
from offload.format.part_file import PartReference, SealedPart, content_digest
from offload.format.shares.part_table import OwnerTable
from offload.store.slots.folder import (
    FileIds,
    Folder,
    adopt_folder,
    create_folder,
    has_other_names,
    open_folder,
)
from offload.store.store_errors import naming_free_space


class SlotState(Enum):
    """Stage of a slot's life."""

    FREE = "free"
    """The content is not needed. The next stage is WORKING."""

    WORKING = "working"
    """Steps write the content of one generation; it may be torn. The next stage is IN_DOUBT, or
    WORKING with another generation."""

    IN_DOUBT = "in doubt"
    """The slot may be, or become, a checkpoint's: the rename that commits it has begun, or for an
    owner's part, its reference may be in a manifest. The next stage is SEALED if the checkpoint is
    durable, and for an owner's part WORKING if it was aborted, and ABANDONED if that is not
    known. A slot whose rename fails stays in doubt."""

    SEALED = "sealed"
    """The slot is a checkpoint's. The next stage is FREE."""

    ABANDONED = "abandoned"
    """A checkpoint may name the owner's part, or its content is unknown. This process never writes
    it."""


class OpenSlot(SlotFiles):
    """Open files of one slot, and what this process knows about their content.

    Every slot begins as FREE.
    """

    _NOT_IN_PLACE: ClassVar[str]

    def __init__(self, layout: Layout, folder: Folder, model_leaves: KnownLeaves) -> None:
        super().__init__(layout, folder.files)
        self.folder = folder
        self.state = SlotState.FREE
        """Stage of the slot's life. Only the store changes it."""
        self.model_leaves = model_leaves
        """Known content of the file with the model's tensors, if the slot has one."""
        self._arrivals: Arrivals | None = None

    @property
    def path(self) -> str:
        """Present path of the slot's directory."""
        return self.folder.path

    @property
    def document_bytes(self) -> int:
        """Size in bytes of the files that are written as a whole when the slot is sealed."""
        return self.folder.document.size_bytes

    def begin_generation(self, context: DigestContext) -> None:
        """Forget the old content: from now on, the slot is written as another generation."""
        self.state = SlotState.WORKING
        self._arrivals = None
        self.context = context
        self.digests = {name: [None] * self.layout.num_chunks for name in self.layout.array_names}
        self.trust()

    def arriving(self, arrivals: Arrivals) -> None:
        """Record that chunks of the present generation are still to come from elsewhere."""
        self._arrivals = arrivals

    def has_arrived(self, chunk: int) -> bool:
        """Return whether the slot holds a chunk; False while it is on its way from elsewhere."""
        return self._arrivals is None or self._arrivals.has(chunk)

    def wait_arrived(self, chunk: int) -> None:
        """Wait until the slot holds a chunk; raises the error of a chunk that will not arrive."""
        if self._arrivals is not None:
            self._arrivals.wait(chunk)

    def opened_sealed(self, sealed: Manifest | OwnerTable) -> None:
        """Record that the slot is a checkpoint's, whose state is compared when it is read."""
        self.state = SlotState.SEALED
        self._take_digests(sealed)

    def published(self) -> None:
        """Record that the checkpoint is durable."""
        self.state = SlotState.SEALED
        self.folder.let_others_lock()

    def is_in_place(self) -> bool:
        """Return whether the slot's files are under their names; see `Folder`."""
        return self.folder.is_in_place()

    def is_surely_in_place(self) -> bool:
        """Return whether the slot's files are under their names; False if that is unknown."""
        with suppress(StorageError):
            return self.is_in_place()
        return False

    def require_in_place(self) -> None:
        """Check that the data written to the slot is under its name."""
        if not self.is_in_place():
            raise StoreError(errno.ESTALE, self._NOT_IN_PLACE, self.path)

    def close(self) -> None:
        """Close all files, and release the lock of `Folder.hold`. Idempotent."""
        self.folder.close()


class OwnerSlot(OpenSlot):
    """The part of an owner other than the first, whose stages `OwnerStore` decides.

    It has a file with tensors of the model only if its layout has a shard file.
    """

    _NOT_IN_PLACE = (
        "its files are not those that this process opened: some have been replaced, moved "
        "or removed meanwhile. Leave the files of a store alone until its training has "
        "ended, and start it again"
    )

    @property
    def name(self) -> str:
        """Name of the part in the directory of the owner."""
        return self.folder.name


class Slot(OpenSlot):
    """A slot of a store, with its part on each drive but the first."""

    _NOT_IN_PLACE = (
        "its files are not those that this process wrote: some have been replaced, moved "
        "or removed while it trains. Call checkpoint() again, which writes everything to "
        "another slot, and leave the files of a store alone until its training has ended"
    )

    def __init__(
        self, layout: Layout, folder: Folder, leaves: KnownLeaves, *, writable: bool = True
    ) -> None:
        super().__init__(layout, folder, leaves)
        self.parts: tuple[Folder, ...] = ()
        """The slot's part on each drive but the first, in order."""
        self.writable = writable
        """Whether the files are open for writing."""

    @property
    def sizes(self) -> dict[str, int]:
        """Size in bytes of every file of the slot's own directory, by name."""
        return {name: file.size_bytes for name, file in self.folder.files.items()}

    def add_parts(self, parts: tuple[Folder, ...]) -> None:
        """Add the parts of a slot that was created or opened without them."""
        self.parts = parts
        self.files_by_drive = (self.folder.files, *(part.files for part in parts))

    @property
    def part_references(self) -> tuple[PartReference, ...]:
        """References to the parts for the manifest, with the present digests."""
        return tuple(
            PartReference(os.path.dirname(part.path), part.name, sealed.generation, sealed.digest)
            for part, sealed in zip(self.parts, self._sealed_parts(), strict=True)
        )

    def _sealed_parts(self) -> list[SealedPart]:
        """Return the content of each part's ``part.json``, with the present digests."""
        return [
            SealedPart(
                self.context.store_id,
                self.context.generation,
                drive,
                content_digest(self.layout, self.digests, drive),
            )
            for drive in range(1, len(self.parts) + 1)
        ]

    @property
    def manifest(self) -> File:
        """The file ``manifest.json``."""
        return self.folder.document

    @property
    def document_bytes(self) -> int:
        """Size in bytes of the files that are written as a whole when the slot is sealed."""
        return self.manifest.size_bytes + self.train_state.size_bytes

    @property
    def train_state(self) -> File:
        """The file ``train_state.safetensors``."""
        return self.folder.files[TRAIN_STATE_NAME]

    def write_replacement(self, name: str, data: bytes) -> File:
        """Write a file that `replace` can put in the place of a small file; not synced."""
        backend, path = self.folder.backend, f"{self.path}/{name}.new"
        if backend.stat(path) is not None:
            backend.remove(path)
        with naming_free_space(backend, path, len(data), name):
            file = backend.create(path, len(data))
        try:
            file.write_bytes(data, 0)
        except BaseException:
            file.close()
            raise
        return file

    def replace(self, name: str, file: File) -> None:
        """Put the result of `write_replacement` in the place of a file, atomically and durably."""
        backend, path, files = self.folder.backend, f"{self.path}/{name}", self.folder.files
        try:
            file.sync()
            backend.rename(file.path, path)
            backend.sync_dir(self.path)
        except BaseException:
            file.close()
            raise
        file.path = path
        files[name].close()
        files[name] = file

    @property
    def ids(self) -> FileIds:
        """Inodes and sizes of the open files: by name, and those of the parts by path."""
        of_parts = {f"{p.path}/{name}": known for p in self.parts for name, known in p.ids.items()}
        return self.folder.ids | of_parts

    def is_in_place(self) -> bool:
        """Return whether the files of the slot and of its parts are under their names."""
        return all(folder.is_in_place() for folder in (self.folder, *self.parts))

    def is_linked(self) -> bool:
        """Return whether a file of the slot, or of its parts, has further hard links."""
        return any(has_other_names(one.backend, one.path) for one in (self.folder, *self.parts))

    def invalidate(self) -> None:
        """Durably overwrite the manifest, then the documents of the parts: the slot is free."""
        self.state = SlotState.FREE
        self.folder.invalidate()
        for part in self.parts:
            part.invalidate()

    def sync(self) -> None:
        """Make all tensor files and the train state durable, but not the manifest or file names.

        The parts are sealed: their ``part.json`` and their names become durable as well.
        """
        for part, sealed in zip(self.parts, self._sealed_parts(), strict=True):
            part.seal(sealed.encode())
        self.folder.sync_data()

    def close(self) -> None:
        """Close all files, and release the lock of `Folder.hold`. Idempotent."""
        super().close()
        for part in self.parts:
            part.close()


def create_slot(backend: Backend, path: str, layout: Layout, sizes: Mapping[str, int]) -> Slot:
    """Create a slot without parts; see `create_folder`."""
    folder = create_folder(backend, path, MANIFEST_NAME, sizes, layout)
    return Slot(layout, folder, _unknown_leaves(folder, layout, readable=False))


def adopt_slot(
    backend: Backend, path: str, layout: Layout, sizes: Mapping[str, int]
) -> Slot | None:
    """Open a leftover slot for rewriting, without parts, if it fits; see `adopt_folder`."""
    folder = adopt_folder(backend, path, MANIFEST_NAME, sizes, layout)
    if folder is None:
        return None
    return Slot(layout, folder, _unknown_leaves(folder, layout, readable=True))


def open_slot(backend: Backend, path: str, layout: Layout, *, writable: bool) -> Slot:
    """Open the files of an existing slot, without parts; see `open_folder`."""
    names = (*layout.file_sizes(), TRAIN_STATE_NAME, MANIFEST_NAME)
    folder = open_folder(backend, path, MANIFEST_NAME, names, writable=writable)
    return Slot(layout, folder, _unknown_leaves(folder, layout, readable=True), writable=writable)


def _unknown_leaves(folder: Folder, layout: Layout, *, readable: bool) -> KnownLeaves:
    return KnownLeaves(folder.files[layout.model_name].inode, readable=readable)


class Arrivals:
    """Record of the chunks that a slot is still waiting for; any thread may use it.

    A chunk has arrived when all of its pieces have been compared with their digests and written.

    Args:
        pieces: Chunk of each piece that is still to come. A chunk that is not named is there.
    """

    def __init__(self, pieces: Iterable[int]) -> None:
        self._changed = Monitor()
        self._missing = Counter(pieces)
        self._error: Exception | None = None

    def has(self, chunk: int) -> bool:
        """Return whether all of a chunk has arrived."""
        return not self._missing[chunk]

    def wait(self, chunk: int) -> None:
        """Wait until all of a chunk has arrived; raise the error of `fail` if it will not."""
        self._changed.wait_until(lambda: self.has(chunk) or self._error is not None)
        if self._error is not None and not self.has(chunk):
            raise self._error

    def add(self, chunk: int) -> None:
        """Record that a piece of a chunk has arrived."""
        with self._changed:
            self._missing[chunk] -= 1
            if not self._missing[chunk]:
                self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Record that what is missing will not arrive; every wait for it raises the error."""
        with self._changed:
            self._error = error
            self._changed.notify_all()
