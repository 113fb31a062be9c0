"""Identities of files: whether a path still names a known file, and whether a file has other links.

A user may replace files of a store while a process trains in it: ``rsync``, or ``mv`` and ``cp``,
leave the same bytes in new files. Data that the process writes to its open files then does not
appear under the paths of the store.

A user may also make further hard links to files, such as a backup by ``cp -al``, ``ln`` or
``rsync -H``. Slots are rewritten in place, which would change the backup as well. Therefore a slot
or part that has a file with several links is never rewritten: it is removed, and a new one is
created.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from gds import Backend, File
from offload.store.slots.folder import files_in

FileIds: TypeAlias = dict[str, tuple[int, int]]
"""Inode and size in bytes of files, by name or by path."""


def ids_of(files: Mapping[str, File]) -> FileIds:
    """Return the inodes and sizes of open files, under the given names."""
    return {name: (file.inode, file.size_bytes) for name, file in files.items()}


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


def has_other_names(backend: Backend, directory: str) -> bool:
    """Return whether a file in a directory has another hard link, in the directory or elsewhere."""
    stats = (backend.stat(f"{directory}/{name}") for name in files_in(backend, directory))
    return any(stat is not None and stat.num_links > 1 for stat in stats)
