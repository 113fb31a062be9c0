"""Parts of slots: directories on a store's further drives, each with a share of a slot's state.

A part ``part-<k>`` keeps its name as long as it exists. A part belongs to the checkpoint whose
manifest names it; without that manifest it cannot be read. Like a slot, a part has its final size
from the start.
"""

from __future__ import annotations

from collections.abc import Mapping

from gds import Backend, File
from offload.format.layout import Layout, array_file_name
from offload.format.names import PART_FILE_NAME
from offload.format.part_file import SealedPart, invalid_part, part_sizes
from offload.store.file_identity import FileIds, has_other_names, ids_in, ids_of
from offload.store.slots.folder import remove_folder


class Part:
    """Open files of one part.

    Args:
        backend: Backend of the part's drive.
        directory: The store's directory on that drive.
        name: Name of the part within that directory.
        drive: Position of the drive among the store's drives. The first drive, 0, has no parts.
        files: Open files by name.
    """

    def __init__(
        self,
        backend: Backend,
        directory: str,
        name: str,
        drive: int,
        files: dict[str, File],
    ) -> None:
        self._backend = backend
        self._files = files
        self._is_durable = False
        self.directory = directory
        self.name = name
        self.drive = drive

    @property
    def path(self) -> str:
        """Path of the part's directory."""
        return f"{self.directory}/{self.name}"

    @property
    def files(self) -> Mapping[str, File]:
        """Open files of the part, by name."""
        return self._files

    def array(self, name: str) -> File:
        """Return the open file with the part's share of a state array."""
        return self._files[array_file_name(name)]

    @property
    def ids(self) -> FileIds:
        """Inodes and sizes of the open files, by path."""
        return ids_of({f"{self.path}/{name}": file for name, file in self._files.items()})

    def is_in_place(self) -> bool:
        """Return whether the part's directory still holds the open files; see `Slot.is_in_place`.

        Raises:
            gds.StorageError: The files cannot be examined at this moment.
        """
        return ids_in(self._backend, self.path, self._files) == ids_of(self._files)

    def is_linked(self) -> bool:
        """Return whether a file of the part has further hard links."""
        return has_other_names(self._backend, self.path)

    def invalidate(self) -> None:
        """Durably invalidate the part, so that no manifest matches it.

        Call this before data is written.
        """
        self._files[PART_FILE_NAME].write_bytes(invalid_part(), 0)
        self._files[PART_FILE_NAME].sync()

    def seal(self, what: SealedPart) -> None:
        """Make the part's data durable, then its ``part.json``, then the names of its files.

        The first call also makes the name of the part itself durable.

        Args:
            what: New content of ``part.json``.

        Raises:
            gds.StorageError: A write or a sync failed.
        """
        own = self._files[PART_FILE_NAME]
        for file in self._files.values():
            if file is not own:
                file.sync()
        own.write_bytes(what.encode(), 0)
        own.sync()
        self._backend.sync_dir(self.path)
        # The name of an adopted part may not be durable yet: this process may have created it.
        if not self._is_durable:
            self._backend.sync_dir(self.directory)
            self._is_durable = True

    def write_headers(self, layout: Layout) -> None:
        """Write the headers of all state-array files of the part; not synced."""
        for name, header in layout.array_headers[self.drive].items():
            self.array(name).write_bytes(header.encoded, 0)

    def remove(self) -> None:
        """Close the files and remove the part from the drive."""
        self.close()
        remove_part(self._backend, self.path)

    def close(self) -> None:
        """Close all files. Idempotent."""
        for file in self._files.values():
            file.close()


def create_part(backend: Backend, directory: str, name: str, layout: Layout, drive: int) -> Part:
    """Create a part: reserve its space and write its headers. Nothing is durable yet."""
    path = f"{directory}/{name}"
    backend.make_dir(path)
    part = Part(backend, directory, name, drive, {})
    try:
        for file, size in part_sizes(layout, drive).items():
            part._files[file] = backend.create(f"{path}/{file}", size)
        part._files[PART_FILE_NAME].write_bytes(invalid_part(), 0)
        part.write_headers(layout)
    except BaseException:
        part.remove()
        raise
    return part


def adopt_part(
    backend: Backend, directory: str, name: str, layout: Layout, drive: int
) -> Part | None:
    """Open a free part for rewriting if its files fit the layout, else return None.

    An adopted part is durably invalidated, and its headers are written. A part is not adopted if
    one of its files has another hard link, because a write would change the linked file as well.
    """
    sizes, path = part_sizes(layout, drive), f"{directory}/{name}"
    if not _fits(backend, path, sizes) or has_other_names(backend, path):
        return None
    part = open_part(backend, directory, name, layout, drive, writable=True)
    try:
        part.invalidate()
        part.write_headers(layout)
    except BaseException:
        part.close()
        raise
    return part


def open_part(
    backend: Backend, directory: str, name: str, layout: Layout, drive: int, *, writable: bool
) -> Part:
    """Open the files of an existing part.

    Raises:
        gds.StorageError: A file cannot be opened. No file is left open.
    """
    part = Part(backend, directory, name, drive, {})
    try:
        for file in part_sizes(layout, drive):
            part._files[file] = backend.open(f"{part.path}/{file}", writable=writable)
    except BaseException:
        part.close()
        raise
    return part


def remove_part(backend: Backend, path: str) -> None:
    """Remove a part's directory and the files in it, if the directory exists."""
    if backend.stat(path) is not None:
        remove_folder(backend, path)


def _fits(backend: Backend, path: str, sizes: Mapping[str, int]) -> bool:
    """Return whether a part has exactly the expected regular files, with these sizes in bytes."""
    if set(backend.list_dir(path)) != set(sizes):
        return False
    stats = {name: backend.stat(f"{path}/{name}") for name in sizes}
    return all(
        stat is not None and stat.kind == "file" and stat.size_bytes == sizes[name]
        for name, stat in stats.items()
    )
