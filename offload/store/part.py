"""Parts of slots: the directories on a store's other drives that hold a share of its state.

A part ``part-<k>`` keeps its name for as long as it exists. It means nothing by itself: it belongs
to the checkpoint whose manifest names it. Like a slot it has its final size from the start.
"""

from __future__ import annotations

from collections.abc import Mapping

from gds import Backend, File
from offload.format.layout import Layout, array_file_name
from offload.format.names import PART_FILE_NAME
from offload.format.part_file import SealedPart, invalid_part, part_sizes
from offload.store.hard_links import has_other_names
from offload.store.in_place import FileIds, ids_in, ids_of


class Part:
    """The open files of one part.

    Args:
        backend: Of its drive.
        directory: Of its drive.
        name: Within that.
        drive: Position of the drive among the store's.
        files: Open, by name.
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
        """The part's directory."""
        return f"{self.directory}/{self.name}"

    def array(self, name: str) -> File:
        """Return the file of a state array."""
        return self._files[array_file_name(name)]

    @property
    def ids(self) -> FileIds:
        """By what its open files are known: by path."""
        return ids_of({f"{self.path}/{name}": file for name, file in self._files.items()})

    def is_in_place(self) -> bool:
        """Return whether its directory holds the files that are open; as `Slot.is_in_place`."""
        return ids_in(self._backend, self.path, self._files) == ids_of(self._files)

    def is_linked(self) -> bool:
        """Return whether a file of it has a name elsewhere as well."""
        return has_other_names(self._backend, self.path)

    def invalidate(self) -> None:
        """Make it a part that no manifest's word agrees with; durable. Before data is written."""
        self._files[PART_FILE_NAME].write_bytes(invalid_part(), 0)
        self._files[PART_FILE_NAME].sync()

    def seal(self, what: SealedPart) -> None:
        """Make its data durable, then what it says of itself, then its names."""
        own = self._files[PART_FILE_NAME]
        for file in self._files.values():
            if file is not own:
                file.sync()
        own.write_bytes(what.encode(), 0)
        own.sync()
        self._backend.sync_dir(self.path)
        if not self._is_durable:  # also one that was found: this process may have made it
            self._backend.sync_dir(self.directory)
            self._is_durable = True

    def write_headers(self, layout: Layout) -> None:
        """Write the headers of all its files."""
        for name, header in layout.array_headers[self.drive].items():
            self.array(name).write_bytes(header.encoded, 0)

    def remove(self) -> None:
        """Close it and remove it from the drive."""
        self.close()
        remove_part(self._backend, self.path)

    def close(self) -> None:
        """Close all files. Idempotent."""
        for file in self._files.values():
            file.close()


def create_part(backend: Backend, directory: str, name: str, layout: Layout, drive: int) -> Part:
    """Make a part: reserve its space and write its headers. Nothing of it is durable yet.

    Raises:
        gds.StorageError: No space, or the name is taken; what had been made is removed.
    """
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
    """Open a part that nobody needs for rewriting if its files fit, else return None.

    Nor does it if a file of it has another name elsewhere, for it would change there as well.
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
    """Open the files of an existing part."""
    part = Part(backend, directory, name, drive, {})
    try:
        for file in part_sizes(layout, drive):
            part._files[file] = backend.open(f"{part.path}/{file}", writable=writable)
    except BaseException:
        part.close()
        raise
    return part


def remove_part(backend: Backend, path: str) -> None:
    """Remove a part's directory and the files in it, if it is there."""
    if backend.stat(path) is None:
        return
    for name in backend.list_dir(path):
        backend.remove(f"{path}/{name}")
    backend.remove_dir(path)


def _fits(backend: Backend, path: str, sizes: Mapping[str, int]) -> bool:
    if set(backend.list_dir(path)) != set(sizes):
        return False
    stats = {name: backend.stat(f"{path}/{name}") for name in sizes}
    return all(
        stat is not None and stat.kind == "file" and stat.size_bytes == sizes[name]
        for name, stat in stats.items()
    )
