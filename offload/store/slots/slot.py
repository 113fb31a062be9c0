"""One slot: a preallocated directory of state-array files, with open handles.

On a store of several drives, a slot has parts on the other drives; see `Slot.parts`.

The files of a slot have their final size and valid headers as soon as the slot exists. After that,
only their content changes. `SlotState` names the stages of a slot's life, and only the methods of
`Slot` lead from one to the next.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from enum import Enum

from gds import Backend, File
from gds.contract import Lock
from offload.checkpoint.sealed_slot import SlotFiles
from offload.errors import StoreError
from offload.format.digests import DigestContext, KnownLeaves
from offload.format.layout import Layout, array_file_name
from offload.format.manifest import Manifest, invalid_manifest
from offload.format.names import MANIFEST_NAME, QUARANTINE_NAME, TRAIN_STATE_NAME
from offload.format.part_file import PartReference, SealedPart, content_digest
from offload.store.arrivals import Arrivals
from offload.store.file_identity import FileIds, has_other_names, ids_in, ids_of
from offload.store.full_disk import naming_free_space
from offload.store.slots.folder import files_in, make_folder, remove_folder, sync_names
from offload.store.slots.part import Part


class SlotState(Enum):
    """Stage of a slot's life."""

    FREE = "free"
    """The content is not needed. The next stage is WORKING."""

    WORKING = "working"
    """Steps write the content of one generation; it may be torn. The next stage is IN_DOUBT, or
    WORKING with another generation."""

    IN_DOUBT = "in doubt"
    """A rename that makes the slot a checkpoint has begun and is not known to be durable. The next
    stage is SEALED; if the rename fails, the slot stays in doubt."""

    SEALED = "sealed"
    """The slot is a checkpoint. The next stage is FREE."""


class Slot(SlotFiles):
    """Open files of one slot, and what this process knows about their content.

    Every slot begins as FREE.

    Args:
        backend: Backend of the slot's directory.
        path: Path of the slot's directory.
        layout: Layout of the slot.
        files: Open files by name.
        model_leaves: Known content of ``model.safetensors``.
        writable: Whether the files are open for writing.
    """

    def __init__(
        self,
        backend: Backend,
        path: str,
        layout: Layout,
        files: dict[str, File],
        model_leaves: KnownLeaves,
        *,
        writable: bool = True,
    ) -> None:
        super().__init__(layout, files)
        self._backend = backend
        self._path = path
        self._files = files
        self._parts: tuple[Part, ...] = ()
        self._writable = writable
        self._model_leaves = model_leaves
        self._state = SlotState.FREE
        self._lock: Lock | None = None
        self._arrivals: Arrivals | None = None

    @property
    def state(self) -> SlotState:
        """Stage of the slot's life."""
        return self._state

    @property
    def parts(self) -> tuple[Part, ...]:
        """The slot's part on each drive but the first, in order."""
        return self._parts

    @property
    def writable(self) -> bool:
        """Whether the files are open for writing."""
        return self._writable

    @property
    def model_leaves(self) -> KnownLeaves:
        """Known content of ``model.safetensors``."""
        return self._model_leaves

    @property
    def path(self) -> str:
        """Present path of the slot's directory."""
        return self._path

    @property
    def sizes(self) -> dict[str, int]:
        """Size in bytes of every file, by name."""
        return {name: file.size_bytes for name, file in self._files.items()}

    def add_parts(self, parts: tuple[Part, ...]) -> None:
        """Add the parts of a slot that was created or opened without them."""
        self._parts = parts
        self._files_by_drive = (self._files, *(part.files for part in parts))

    def renamed(self, path: str) -> None:
        """Record that the directory has a new path."""
        self._path = path
        for name, file in self._files.items():
            file.path = f"{path}/{name}"

    def begin_generation(self, context: DigestContext) -> None:
        """Forget the old content: from now on, the slot is written as another generation.

        Args:
            context: Store and generation that digests of the new content are bound to.
        """
        self._state = SlotState.WORKING
        self._arrivals = None
        self._context = context
        self._digests = {name: [None] * self.layout.num_chunks for name in self.layout.array_names}
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

    def begin_publication(self) -> None:
        """Record that a rename begins, after which the slot may be a checkpoint."""
        self._state = SlotState.IN_DOUBT

    def published(self) -> None:
        """Record that the rename is durable: the slot is a checkpoint."""
        self._state = SlotState.SEALED
        self._let_others_lock()

    def hold(self) -> None:
        """Take a shared lock on the directory while this process writes the slot.

        The lock keeps a later job of several ranks from rewriting the slot beside this process.

        Raises:
            gds.LockHeldError: Another process is about to rewrite the slot.
            gds.StorageError: The directory cannot be locked.
        """
        if self._lock is None:
            self._lock = self._backend.lock(self._path, shared=True)

    def _let_others_lock(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def opened_sealed(self, manifest: Manifest, known: KnownLeaves | None) -> None:
        """Record that the slot, which has just been opened, is a checkpoint.

        Its state is compared with its digests when it is read.
        """
        self._state = SlotState.SEALED
        self._take_digests(manifest)
        if known is not None and known.inode == self._model_leaves.inode != 0:
            self._model_leaves = known

    @property
    def part_references(self) -> tuple[PartReference, ...]:
        """References to the parts for the manifest, with the present digests."""
        return tuple(
            PartReference(part.directory, part.name, sealed.generation, sealed.digest)
            for part, sealed in zip(self.parts, self._sealed_parts(), strict=True)
        )

    def _sealed_parts(self) -> list[SealedPart]:
        """Return the content of each part's ``part.json``, with the present digests."""
        return [
            SealedPart(
                self.context.store_id,
                self.context.generation,
                part.drive,
                content_digest(self.layout, self.digests, part.drive),
            )
            for part in self.parts
        ]

    @property
    def manifest(self) -> File:
        """The file ``manifest.json``."""
        return self._files[MANIFEST_NAME]

    @property
    def document_bytes(self) -> int:
        """Size in bytes of the files that are written as a whole when the slot is sealed."""
        return self.manifest.size_bytes + self.train_state.size_bytes

    @property
    def train_state(self) -> File:
        """The file ``train_state.safetensors``."""
        return self._files[TRAIN_STATE_NAME]

    def write_replacement(self, name: str, data: bytes) -> File:
        """Write a file that `replace` can put in the place of a small file; not synced."""
        path = f"{self._path}/{name}.new"
        if self._backend.stat(path) is not None:
            self._backend.remove(path)
        with naming_free_space(self._backend, path, len(data), name):
            file = self._backend.create(path, len(data))
        try:
            file.write_bytes(data, 0)
        except BaseException:
            file.close()
            raise
        return file

    def replace(self, name: str, file: File) -> None:
        """Put the result of `write_replacement` in the place of a file, atomically and durably.

        Args:
            name: Name of the file to replace.
            file: Result of `write_replacement`. It is closed if the replacement fails.

        Raises:
            gds.StorageError: The file could not be replaced durably.
        """
        try:
            file.sync()
            self._backend.rename(file.path, f"{self._path}/{name}")
            self._backend.sync_dir(self._path)
        except BaseException:
            file.close()
            raise
        file.path = f"{self._path}/{name}"
        self._files[name].close()
        self._files[name] = file

    @property
    def ids(self) -> FileIds:
        """Inodes and sizes of the open files: by name, and those of the parts by path."""
        return ids_of(self._files) | {k: v for part in self.parts for k, v in part.ids.items()}

    def is_in_place(self) -> bool:
        """Return whether the slot's directory, and those of its parts, hold the open files.

        They do not if a user has replaced, moved or removed files. Data written to the slot then
        does not appear under its name.

        Raises:
            gds.StorageError: The files cannot be examined at this moment.
        """
        return self.is_at_path() and all(part.is_in_place() for part in self.parts)

    def is_at_path(self) -> bool:
        """Return whether the slot's own directory holds the open files, without regard to parts."""
        return ids_in(self._backend, self._path, self._files) == ids_of(self._files)

    def require_in_place(self) -> None:
        """Check that the data written to the slot is under its name."""
        if not self.is_in_place():
            raise StoreError(
                errno.ESTALE,
                "its files are not those that this process wrote: some have been replaced, moved "
                "or removed while it trains. Call checkpoint() again, which writes everything to "
                "another slot, and leave the files of a store alone until its training has ended",
                self._path,
            )

    def is_linked(self) -> bool:
        """Return whether a file of the slot, or of its parts, has further hard links."""
        return has_other_names(self._backend, self._path) or any(p.is_linked() for p in self.parts)

    def invalidate(self) -> None:
        """Durably overwrite the manifest, so that nobody takes this slot for a checkpoint.

        The parts are durably invalidated after the manifest. From now on the slot is free.
        """
        self._state = SlotState.FREE
        self.manifest.write_bytes(invalid_manifest(self.manifest.size_bytes), 0)
        self.manifest.sync()
        for part in self.parts:
            part.invalidate()

    def sync(self) -> None:
        """Make all tensor files and the train state durable, but not the manifest or file names.

        The parts are sealed: their ``part.json`` and their names become durable as well.

        Raises:
            gds.StorageError: A write or a sync failed.
        """
        for part, sealed in zip(self.parts, self._sealed_parts(), strict=True):
            part.seal(sealed)
        for name, file in self._files.items():
            if name != MANIFEST_NAME:
                file.sync()

    def sync_names(self) -> None:
        """Make the names of the slot's own files durable."""
        sync_names(self._backend, self._path, self._files)

    def close(self) -> None:
        """Close all files, and release the lock of `hold`. Idempotent."""
        self._let_others_lock()
        for file in self._files.values():
            file.close()
        for part in self.parts:
            part.close()


def create_slot(backend: Backend, path: str, layout: Layout, sizes: Mapping[str, int]) -> Slot:
    """Create a slot without parts: reserve space, write headers. Nothing is durable yet."""
    make_folder(backend, path, sizes)
    files: dict[str, File] = {}
    try:
        for name, size in sizes.items():
            files[name] = backend.create(f"{path}/{name}", size)
        leaves = _model_leaves(backend, path, layout, readable=False)
        slot = Slot(backend, path, layout, files, leaves)
        slot.manifest.write_bytes(invalid_manifest(slot.manifest.size_bytes), 0)
        _write_headers(slot)
    except BaseException:
        for file in files.values():
            file.close()
        remove_slot(backend, path)
        raise
    return slot


def adopt_slot(
    backend: Backend, path: str, layout: Layout, sizes: Mapping[str, int]
) -> Slot | None:
    """Open a leftover slot for rewriting if its files have the right sizes, else return None.

    An adopted slot is durably invalidated, and its headers are written. Files that are not part of
    a checkpoint, such as the ``config.json`` of a model, are removed from it. A slot is not adopted
    if one of its files has another hard link, because a write would change the linked file as well,
    nor if it is marked as damaged.
    """
    names = set(files_in(backend, path))
    if not names >= set(sizes) or QUARANTINE_NAME in names:
        return None
    for name, size in sizes.items():
        stat = backend.stat(f"{path}/{name}")
        if stat is None or stat.kind != "file" or stat.size_bytes != size:
            return None
    if has_other_names(backend, path):
        return None
    for name in sorted(names - set(sizes)):
        backend.remove(f"{path}/{name}")
    slot = open_slot(backend, path, layout, writable=True)
    slot.invalidate()
    _write_headers(slot)
    return slot


def open_slot(backend: Backend, path: str, layout: Layout, *, writable: bool) -> Slot:
    """Open the files of an existing slot, without parts.

    Raises:
        gds.StorageError: A file cannot be opened. No file is left open.
    """
    files: dict[str, File] = {}
    try:
        for name in (*layout.file_sizes(), TRAIN_STATE_NAME, MANIFEST_NAME):
            files[name] = backend.open(f"{path}/{name}", writable=writable)
        leaves = _model_leaves(backend, path, layout, readable=True)
    except BaseException:
        for file in files.values():
            file.close()
        raise
    return Slot(backend, path, layout, files, leaves, writable=writable)


def remove_slot(backend: Backend, path: str) -> None:
    """Remove a slot's directory and the files in it."""
    remove_folder(backend, path)


def _model_leaves(backend: Backend, path: str, layout: Layout, *, readable: bool) -> KnownLeaves:
    """Return a record of a newly opened model file, none of whose content is known yet."""
    stat = backend.stat(f"{path}/{layout.model_name}")
    return KnownLeaves(stat.inode if stat is not None else 0, readable=readable)


def _write_headers(slot: Slot) -> None:
    layout = slot.layout
    slot.model.write_bytes(layout.model_file_header.encoded, 0)
    for name, header in layout.array_headers[0].items():
        slot._files[array_file_name(name)].write_bytes(header.encoded, 0)
