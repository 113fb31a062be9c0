"""Places of files and folders that checkpoints have listed, after these or the store have moved.

A checkpoint lists paths as they were, and the directory of the store at that moment. If the store
lies elsewhere now, what was beside it is looked for beside it: runs are moved and copied as a
whole. The original of a copied store keeps its own files, so these are not looked at.

A path that is missing may have been removed or moved, or its drive may not be mounted. It counts as
removed only if its parent directory is known to be the one that it was in:

- it has the inode that the parent had then;
- or something that was listed with the same inode is in it (a copy has other inodes);
- or this process has seen the path there, and the parent is still that directory.

The inode matters because libraries make a missing directory anew.
"""

from __future__ import annotations

import os
from collections.abc import Collection


class Places:
    """Places where listed paths may be now.

    Args:
        store: First directory of the store.
        used: Directories that the library reads from or writes into; more may be added later.
    """

    def __init__(self, store: str, used: Collection[str]) -> None:
        self._store = store
        self._used = used
        self._seen: dict[str, tuple[int, int]] = {}
        """Device and inode of the parent directory of each path that this process has seen."""

    def of(self, path: str, store: str | None) -> dict[str, bool]:
        """Return where something may be now that had a path when the store was in a directory.

        The likeliest comes first. The value says whether everything that was beside it must be
        there as well. It need not be in a directory that a single folder was copied to.
        """
        if is_remote(path):
            return {path: True}
        found = [path]
        if store is not None and not _is_same(store, self._store):
            beside = os.path.join(self._store, os.path.relpath(path, store))
            found = [os.path.normpath(beside)]
            if not os.path.lexists(store):  # the store has moved, and perhaps without its files
                found.append(path)
        used = [os.path.join(each, os.path.basename(path)) for each in self._used]
        return {place: place in found for place in dict.fromkeys([*found, *used])}

    def see(self, path: str) -> None:
        """Note that a path exists."""
        try:
            parent = os.stat(os.path.dirname(path))
        except OSError:
            return
        self._seen[path] = (parent.st_dev, parent.st_ino)

    def has_seen(self, path: str) -> bool:
        """Return whether this process has seen something at a path."""
        return path in self._seen

    def is_removed(self, path: str, inode: int, known: Collection[tuple[str, int]]) -> bool:
        """Return whether a path is known to have been removed; an error says nothing about it."""
        try:
            os.lstat(path)
        except FileNotFoundError:
            return self.is_known(path, inode, known)
        except OSError:
            pass
        return False

    def is_known(self, path: str, inode: int, known: Collection[tuple[str, int]]) -> bool:
        """Return whether the parent directory of a path is the one that was listed with an inode.

        `known` has directories, each with the inode that was listed for it.
        """
        directory = os.path.dirname(path)
        if (directory, inode) in known:
            return True
        try:
            parent = os.stat(directory)
            # All file systems of a kind have the same inode at their root.
            if parent.st_ino == inode and not os.path.ismount(directory):
                return True
        except OSError:
            return False
        return self._seen.get(path) == (parent.st_dev, parent.st_ino)


def is_remote(path: str) -> bool:
    """Return whether a path is a URL, of a file on a network."""
    return "://" in path


def inode_of_parent(path: str, known: Collection[tuple[str, int]]) -> int:
    """Return the inode to list for the parent directory of a path, which exists, or of a URL.

    A copy of a directory keeps the inode that was listed for the original, so that everything in it
    is listed with the same one.
    """
    if is_remote(path):
        return 0
    directory = os.path.dirname(path)
    present = os.stat(directory).st_ino
    listed = {inode for name, inode in known if name == directory}
    return present if present in listed or not listed else min(listed)


def make_durable(path: str) -> None:
    """Sync a local file or directory, or its removal, before something older may be removed.

    If it is a directory, all that is in it is synced as well.
    """
    within = [os.path.join(root, name) for root, _, names in os.walk(path) for name in names]
    for each in (*within, path, os.path.dirname(path)):
        try:
            descriptor = os.open(each, os.O_RDONLY)
        except FileNotFoundError:
            continue
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _is_same(directory: str, other: str) -> bool:
    if directory == other:
        return True
    try:
        return os.path.samefile(directory, other)
    except OSError:
        return False
