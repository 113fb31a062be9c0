"""By which files are known again: whether a path still names the file that is open, or was seen.

Somebody may replace files of a store while a process trains in it: ``rsync``, or ``mv`` and ``cp``,
leave the same bytes in other files. What a process writes to the files that it has open does then
not show under their names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from gds import Backend, File

FileIds: TypeAlias = dict[str, tuple[int, int]]
"""Inode and size in bytes of files, by name or by path."""


def ids_of(files: Mapping[str, File]) -> FileIds:
    """Return by what open files are known, under the names that they are given with."""
    return {name: (file.inode, file.size_bytes) for name, file in files.items()}


def ids_in(backend: Backend, directory: str, names: Iterable[str]) -> FileIds:
    """Return by what the files of a directory are known; what is no file there is left out.

    A link to a directory counts as a directory without files: no link is followed in a store.

    Raises:
        gds.StorageError: It cannot be told at this moment.
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
