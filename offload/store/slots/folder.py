"""Folders that a store writes again and again in place: slots, their parts, and parts of owners.

A folder has its final size as soon as it exists; only the content of its files changes. One file is
its *document*: ``manifest.json`` of a slot, ``part.json`` of a part on a further drive, and
``table.json`` of an owner's part. The document is durably invalid before anything else is written,
and is written when everything else is durable.

All files are in the directory itself, except a shard file of the model, which is in a directory of
its own (`offload.format.model_shard`) and is named with it: ``model/shard-....safetensors``.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, TypeAlias

from gds import Backend, File, LockHeldError
from gds.contract import Lock
from offload.errors import StoreBusyError
from offload.format.layout import Layout, array_file_name
from offload.format.manifest import invalid_manifest
from offload.format.names import (
    MANIFEST_NAME,
    PART_FILE_NAME,
    QUARANTINE_NAME,
    SHARD_FOLDER,
    TABLE_NAME,
    is_shard_name,
)
from offload.format.part_file import invalid_part
from offload.format.shares.part_table import invalid_table

READER_POLL_S = 0.05
"""Seconds between two checks whether a reader has released its lock."""

_INVALID: Final[dict[str, Callable[[int], bytes]]] = {
    MANIFEST_NAME: invalid_manifest,
    PART_FILE_NAME: lambda _: invalid_part(),
    TABLE_NAME: invalid_table,
}
"""Content of each document while its folder is being rewritten, given the document's size."""

FileIds: TypeAlias = dict[str, tuple[int, int]]
"""Inode and size in bytes of files, by name or by path."""


class Folder:
    """Open files of one folder.

    A user may replace files while a process trains: ``rsync``, or ``mv`` and ``cp``, leave the same
    bytes in new files. What the process writes to its open files is then not under their names; see
    `is_in_place`.
    """

    def __init__(self, backend: Backend, path: str, document: str, files: dict[str, File]) -> None:
        self.backend = backend
        self.path = path
        self.files = files
        self._document = document
        self._is_name_durable = False
        self._lock: Lock | None = None

    @property
    def name(self) -> str:
        """Name of the directory."""
        return os.path.basename(self.path)

    @property
    def document(self) -> File:
        """The file that says what the folder holds."""
        return self.files[self._document]

    @property
    def ids(self) -> FileIds:
        """Inodes and sizes of the open files, by name."""
        return {name: (file.inode, file.size_bytes) for name, file in self.files.items()}

    def is_in_place(self) -> bool:
        """Return whether the open files are under their names."""
        return ids_in(self.backend, self.path, self.files) == self.ids

    def renamed(self, path: str) -> None:
        """Record that the directory has a new path."""
        self.path = path
        for name, file in self.files.items():
            file.path = f"{path}/{name}"

    def hold(self) -> None:
        """Take a shared lock while this process writes, so that no other one adopts the folder.

        Raises:
            gds.LockHeldError: Another process is about to rewrite the folder.
        """
        if self._lock is None:
            self._lock = self.backend.lock(self.path, shared=True)

    def let_others_lock(self) -> None:
        """Release the lock of `hold`. Idempotent."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def invalidate(self) -> None:
        """Durably overwrite the document, so that nobody takes the content for a sealed one."""
        self._write_invalid()
        self.document.sync()

    def _write_invalid(self) -> None:
        self.document.write_bytes(_INVALID[self._document](self.document.size_bytes), 0)

    def write_headers(self, layout: Layout, drive: int = 0) -> None:
        """Write the headers of all tensor files; not synced."""
        if layout.model_name in self.files:
            self.files[layout.model_name].write_bytes(layout.model_file_header.encoded, 0)
        for name, header in layout.array_headers[drive].items():
            self.files[array_file_name(name)].write_bytes(header.encoded, 0)

    def sync_data(self) -> None:
        """Make all files durable, except the document and the names."""
        for name, file in self.files.items():
            if name != self._document:
                file.sync()

    def sync_names(self) -> None:
        """Make the names of the files durable, those of the shard's directory first."""
        if _has_shard(self.files):
            self.backend.sync_dir(f"{self.path}/{SHARD_FOLDER}")
        self.backend.sync_dir(self.path)

    def seal(self, document: bytes) -> None:
        """Make the data durable, then the document, then the names of all files.

        The first call also makes the name of the folder itself durable.
        """
        self.sync_data()
        self.document.write_bytes(document, 0)
        self.document.sync()
        self.sync_names()
        # The name of an adopted folder may not be durable yet: this process may have created it.
        if not self._is_name_durable:
            self.backend.sync_dir(os.path.dirname(self.path))
            self._is_name_durable = True

    def close(self) -> None:
        """Close all files and release the lock. Idempotent."""
        for file in self.files.values():
            file.close()
        self.let_others_lock()


def create_folder(
    backend: Backend,
    path: str,
    document: str,
    sizes: Mapping[str, int],
    layout: Layout,
    drive: int = 0,
) -> Folder:
    """Create a folder: reserve its space and write its headers. Nothing is durable yet."""
    backend.make_dir(path)
    folder = Folder(backend, path, document, {})
    try:
        if _has_shard(sizes):
            backend.make_dir(f"{path}/{SHARD_FOLDER}")
        for name, size in sizes.items():
            folder.files[name] = backend.create(f"{path}/{name}", size)
        folder._write_invalid()
        folder.write_headers(layout, drive)
    except BaseException:
        folder.close()
        remove_folder(backend, path)
        raise
    return folder


def adopt_folder(
    backend: Backend,
    path: str,
    document: str,
    sizes: Mapping[str, int],
    layout: Layout,
    drive: int = 0,
) -> Folder | None:
    """Open a free folder for rewriting if its files have the right sizes, else return None.

    An adopted folder is durably invalid, and has its headers. Files that are not part of it, such
    as the ``config.json`` of a model, are removed. A folder that is marked as damaged is not
    adopted, nor one whose files have further hard links; see `has_other_names`.
    """
    names = set(files_in(backend, path))
    if not names >= set(sizes) or QUARANTINE_NAME in names:
        return None
    if {name: size for name, (_, size) in ids_in(backend, path, sizes).items()} != dict(sizes):
        return None
    if has_other_names(backend, path):
        return None
    for name in sorted(names - set(sizes)):
        backend.remove(f"{path}/{name}")
    folder = open_folder(backend, path, document, sizes, writable=True)
    try:
        folder.invalidate()
        folder.write_headers(layout, drive)
    except BaseException:
        folder.close()
        raise
    return folder


def open_folder(
    backend: Backend, path: str, document: str, names: Iterable[str], *, writable: bool
) -> Folder:
    """Open files of an existing folder; if one cannot be opened, none is left open."""
    folder = Folder(backend, path, document, {})
    try:
        for name in names:
            folder.files[name] = backend.open(f"{path}/{name}", writable=writable)
    except BaseException:
        folder.close()
        raise
    return folder


def remove_folder(backend: Backend, path: str) -> None:
    """Remove a directory and the files in it, if it exists.

    The document is removed first, so that what an interruption leaves is not sealed.
    """
    if backend.stat(path) is None:
        return
    has_shards = _has_directory_of_shards(backend, path, backend.list_dir(path))
    for name in sorted(files_in(backend, path), key=lambda name: name not in _INVALID):
        backend.remove(f"{path}/{name}")
    if has_shards:
        backend.remove_dir(f"{path}/{SHARD_FOLDER}")
    backend.remove_dir(path)


def files_in(backend: Backend, path: str) -> list[str]:
    """Return the names of all in a directory, with the content of the directory of its shard."""
    names = backend.list_dir(path)
    if not _has_directory_of_shards(backend, path, names):
        return names
    inside = [f"{SHARD_FOLDER}/{name}" for name in backend.list_dir(f"{path}/{SHARD_FOLDER}")]
    return [name for name in names if name != SHARD_FOLDER] + inside


def directories_in(backend: Backend, path: str) -> list[str]:
    """Return the names of the directories in a folder that this library has not made.

    A user has made them, so a folder that has any is neither rewritten nor removed.
    """
    found = ((name, backend.stat(f"{path}/{name}")) for name in files_in(backend, path))
    return [name for name, stat in found if stat is not None and stat.kind == "directory"]


def ids_in(backend: Backend, directory: str, names: Iterable[str]) -> FileIds:
    """Return the inodes and sizes of the regular files in a directory, among the given names.

    A link to a directory counts as a directory without files, because no link is followed in a
    store.
    """
    own = backend.stat(directory)
    if own is None or own.kind != "directory":
        return {}
    stats = {name: backend.stat(f"{directory}/{name}") for name in names}
    return {
        name: (stat.inode, stat.size_bytes)
        for name, stat in stats.items()
        if stat is not None and stat.kind == "file"
    }


def has_other_names(backend: Backend, path: str) -> bool:
    """Return whether a file in a folder has another hard link, in the folder or elsewhere.

    A user may have made one, for example a backup by ``cp -al`` or ``rsync -H``, which rewriting
    the file in place would change as well. So such a folder is removed, and a new one is made.
    """
    stats = (backend.stat(f"{path}/{name}") for name in files_in(backend, path))
    return any(stat is not None and stat.num_links > 1 for stat in stats)


def _has_shard(names: Iterable[str]) -> bool:
    return any(name.startswith(f"{SHARD_FOLDER}/") for name in names)


def _has_directory_of_shards(backend: Backend, path: str, names: Iterable[str]) -> bool:
    """Return whether a directory has that of a shard file; one with other files is a user's."""
    if SHARD_FOLDER not in names:
        return False
    stat = backend.stat(f"{path}/{SHARD_FOLDER}")
    if stat is None or stat.kind != "directory":
        return False
    return all(is_shard_name(name) for name in backend.list_dir(f"{path}/{SHARD_FOLDER}"))


def try_lock(backend: Backend, path: str) -> Lock | None:
    """Lock a directory for rewriting; return None if a reader holds it."""
    try:
        return backend.lock(path)
    except LockHeldError:
        return None


@contextmanager
def locked(backend: Backend, path: str) -> Iterator[bool]:
    """Lock a directory for rewriting during the block; yield False if a reader holds it."""
    lock = try_lock(backend, path)
    try:
        yield lock is not None
    finally:
        if lock is not None:
            lock.release()


def lock_existing(backend: Backend, path: str, timeout_s: float) -> Lock | None:
    """Lock a path for rewriting, waiting for its readers; return None if the path does not exist.

    None is also returned for a symbolic link, a pipe or a device. These are not locked, because no
    reader opens them as a checkpoint.
    """
    deadline = time.monotonic() + timeout_s
    while (stat := backend.stat(path)) is not None and stat.kind != "other":
        lock = try_lock(backend, path)
        if lock is not None:
            return lock
        if time.monotonic() > deadline:
            raise StoreBusyError(
                errno.EBUSY,
                f"it is still being read after {timeout_s:g} s, but must be replaced; close its "
                "readers",
                path,
            )
        time.sleep(READER_POLL_S)
    return None
