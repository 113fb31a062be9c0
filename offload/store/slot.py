"""One slot: a preallocated directory of state-array files, and its open handles.

On a store of several drives it has parts on the others; see `parts`.

A slot's files have their final size and valid headers from the moment it is made; after that only
their content changes. What a slot means (working, free, a checkpoint) is the store's affair.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping

from gds import Backend, File
from offload.errors import StoreError
from offload.format.digests import DigestContext
from offload.format.known_leaves import KnownLeaves
from offload.format.layout import Layout, array_file_name
from offload.format.manifest import invalid_manifest, reserved_bytes
from offload.format.names import MANIFEST_NAME, MODEL_NAME, TRAIN_STATE_NAME
from offload.format.part_file import PartReference, SealedPart, content_digest
from offload.store.full_disk import saying_what_is_free
from offload.store.hard_links import has_other_names
from offload.store.in_place import FileIds, ids_in, ids_of
from offload.store.part import Part


class Slot:
    """The open files of one slot, and what this process knows about their content."""

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
        self._backend = backend
        self._path = path
        self._files = files
        self.parts: tuple[Part, ...] = ()
        """What it has on each drive but the first; given to it by whoever opens it."""
        self.layout = layout
        self.writable = writable
        self.context = DigestContext("", 0)
        self.digests: dict[str, list[str | None]] = {}
        self.model_leaves = model_leaves
        """What this process knows of the content of ``model.safetensors``."""
        self.unchecked = False
        """Whether an earlier process wrote its state, to be compared with its digests when read."""
        self.in_doubt = False
        """Whether it may be a checkpoint: a rename has begun and is not known to be durable."""

    @property
    def path(self) -> str:
        """The slot's directory at present."""
        return self._path

    @property
    def sizes(self) -> dict[str, int]:
        """Size in bytes of every file, by name."""
        return {name: file.size_bytes for name, file in self._files.items()}

    def renamed(self, path: str) -> None:
        """Note that the directory has a new name."""
        self._path = path
        for name, file in self._files.items():
            file.path = f"{path}/{name}"

    def begin_generation(self, context: DigestContext) -> None:
        """Forget the old content: from now on the slot is written as another generation."""
        self.context = context
        self.unchecked = False
        self.digests = {name: [None] * self.layout.num_chunks for name in self.layout.array_names}

    def array(self, name: str, chunk: int) -> File:
        """Return the file that holds a chunk of a state array."""
        drive = self.layout.drives[chunk]
        return self.parts[drive - 1].array(name) if drive else self._files[array_file_name(name)]

    @property
    def part_references(self) -> tuple[PartReference, ...]:
        """What the manifest says of the parts, with the digests that there are now."""
        return tuple(
            PartReference(part.directory, part.name, sealed.generation, sealed.digest)
            for part, sealed in zip(self.parts, self._sealed_parts(), strict=True)
        )

    def _sealed_parts(self) -> list[SealedPart]:
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
    def model(self) -> File:
        """The file ``model.safetensors``."""
        return self._files[MODEL_NAME]

    @property
    def manifest(self) -> File:
        """The file ``manifest.json``."""
        return self._files[MANIFEST_NAME]

    @property
    def train_state(self) -> File:
        """The file ``train_state.safetensors``."""
        return self._files[TRAIN_STATE_NAME]

    def write_replacement(self, name: str, data: bytes) -> File:
        """Write what `replace` is to put in the place of a small file; not synced.

        Raises:
            gds.StorageError: No space; the slot is what it was.
        """
        path = f"{self._path}/{name}.new"
        if self._backend.stat(path) is not None:
            self._backend.remove(path)
        with saying_what_is_free(self._backend, path, len(data), name):
            file = self._backend.create(path, len(data))
        try:
            file.write_bytes(data, 0)
        except BaseException:
            file.close()
            raise
        return file

    def replace(self, name: str, file: File) -> None:
        """Put what `write_replacement` wrote in the place of a file, atomically and durably."""
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
        """By what its open files are known: by name, and those of its parts by path."""
        return ids_of(self._files) | {k: v for part in self.parts for k, v in part.ids.items()}

    def is_in_place(self) -> bool:
        """Return whether its directory, and those of its parts, hold the files that are open.

        They do not if somebody has replaced, moved or removed them. What is written to the slot
        does then not show under its name.

        Raises:
            gds.StorageError: It cannot be told at this moment.
        """
        return self.is_at_path() and all(part.is_in_place() for part in self.parts)

    def is_at_path(self) -> bool:
        """Return whether its own directory holds the files that are open, whatever parts do.

        Raises:
            gds.StorageError: It cannot be told at this moment.
        """
        return ids_in(self._backend, self._path, self._files) == ids_of(self._files)

    def require_in_place(self) -> None:
        """Check that what was written to the slot is under its name.

        Raises:
            StoreError: It is not.
            gds.StorageError: It cannot be told at this moment.
        """
        if not self.is_in_place():
            raise StoreError(
                errno.ESTALE,
                "its files are not the ones that were written: somebody has replaced, moved or "
                "removed some of them while this process trains. Call checkpoint() again, which "
                "writes everything to another slot, and leave the files of a store alone until its "
                "training has ended",
                self._path,
            )

    def is_linked(self) -> bool:
        """Return whether a file of it, or of its parts, has a name elsewhere as well."""
        return has_other_names(self._backend, self._path) or any(p.is_linked() for p in self.parts)

    def invalidate(self) -> None:
        """Overwrite the manifest so that nobody takes this slot for a checkpoint; durable."""
        self.manifest.write_bytes(invalid_manifest(self.manifest.size_bytes), 0)
        self.manifest.sync()
        for part in self.parts:
            part.invalidate()

    def sync(self) -> None:
        """Make all tensor files and the train state durable; neither the manifest nor names.

        Parts are sealed by it: what they say of themselves is durable as well, and their names.
        """
        for part, sealed in zip(self.parts, self._sealed_parts(), strict=True):
            part.seal(sealed)
        for name, file in self._files.items():
            if name != MANIFEST_NAME:
                file.sync()

    def close(self) -> None:
        """Close all files. Idempotent."""
        for file in self._files.values():
            file.close()
        for part in self.parts:
            part.close()


def create_slot(backend: Backend, path: str, layout: Layout, sizes: Mapping[str, int]) -> Slot:
    """Make a slot, without parts: reserve its space and write its headers. Nothing is durable yet.

    Args:
        backend: Where.
        path: The directory to create.
        layout: Gives the headers.
        sizes: Bytes of every file, by name: `slot_sizes`.

    Raises:
        gds.StorageError: No space, or the name is taken; what had been made is removed.
    """
    backend.make_dir(path)
    files: dict[str, File] = {}
    try:
        for name, size in sizes.items():
            files[name] = backend.create(f"{path}/{name}", size)
        slot = Slot(backend, path, layout, files, _model_leaves(backend, path, readable=False))
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
    """Open a leftover slot for rewriting if its files have just the right sizes, else None.

    Nor does it if a file of it has another name elsewhere, for it would change there as well.
    """
    if set(backend.list_dir(path)) != set(sizes):
        return None
    for name, size in sizes.items():
        stat = backend.stat(f"{path}/{name}")
        if stat is None or stat.kind != "file" or stat.size_bytes != size:
            return None
    if has_other_names(backend, path):
        return None
    slot = open_slot(backend, path, layout, writable=True)
    slot.invalidate()
    _write_headers(slot)
    return slot


def open_slot(backend: Backend, path: str, layout: Layout, *, writable: bool) -> Slot:
    """Open the files of an existing slot, without parts."""
    files: dict[str, File] = {}
    try:
        for name in (*layout.file_sizes(), TRAIN_STATE_NAME, MANIFEST_NAME):
            files[name] = backend.open(f"{path}/{name}", writable=writable)
        leaves = _model_leaves(backend, path, readable=True)
    except BaseException:
        for file in files.values():
            file.close()
        raise
    return Slot(backend, path, layout, files, leaves, writable=writable)


def remove_slot(backend: Backend, path: str) -> None:
    """Remove a slot's directory and the files in it."""
    for name in backend.list_dir(path):
        backend.remove(f"{path}/{name}")
    backend.remove_dir(path)


def directories_in(backend: Backend, path: str) -> list[str]:
    """Return the names of the directories in a slot: there are none in one that was made here."""
    found = ((name, backend.stat(f"{path}/{name}")) for name in backend.list_dir(path))
    return [name for name, stat in found if stat is not None and stat.kind == "directory"]


def slot_sizes(layout: Layout, num_groups: int, *, train_state_bytes: int) -> dict[str, int]:
    """Return the size in bytes of every file of a slot, by name."""
    return {
        **layout.file_sizes(),
        TRAIN_STATE_NAME: train_state_bytes,
        MANIFEST_NAME: reserved_bytes(layout, num_groups),
    }


def _model_leaves(backend: Backend, path: str, *, readable: bool) -> KnownLeaves:
    """Return that nothing is known of a slot's model file, which has just been opened."""
    stat = backend.stat(f"{path}/{MODEL_NAME}")
    return KnownLeaves(stat.inode if stat is not None else 0, readable=readable)


def _write_headers(slot: Slot) -> None:
    layout = slot.layout
    slot.model.write_bytes(layout.model_header.encoded, 0)
    for name, header in layout.array_headers[0].items():
        slot._files[array_file_name(name)].write_bytes(header.encoded, 0)
