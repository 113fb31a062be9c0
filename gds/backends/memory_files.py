"""Objects of the memory backend: nodes (files and directories), open files, and locks."""
# ruff: noqa: D102 - the protocols of `gds.contract` document the methods

from __future__ import annotations

import errno
import itertools
import posixpath
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, TypeAlias

from gds.backends.hybrid import Direction
from gds.backends.threads import Meters
from gds.backends.transfer import check_request
from gds.contract import ALIGNMENT, Buffer, File
from gds.errors import ShortReadError, StorageError
from gds.waiting import Pending

_inodes: Final[Iterator[int]] = itertools.count(1)

_changes: Final[Iterator[int]] = itertools.count(1)


class Node:
    """The object that a name refers to, with its locks.

    Like a lock of `flock`, a lock belongs to the object and not to the name. So it stays through a
    rename.
    """

    def __init__(self) -> None:
        self.inode = next(_inodes)
        self.num_shared = 0
        self.exclusive = False


class RegularNode(Node):
    """The bytes of a file; they use capacity while the file has a name or is open."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__()
        self.data = bytearray(size_bytes)
        self.num_open = 0
        self.num_names = 1


class DirectoryNode(Node):
    """The entries of a directory."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = Entries()

    def holds(self, directory: DirectoryNode) -> bool:
        """Return whether `directory` is this directory or is inside it at any depth."""
        return directory is self or any(
            isinstance(entry, DirectoryNode) and entry.holds(directory)
            for entry in self.entries.values()
        )


Entry: TypeAlias = RegularNode | DirectoryNode


class Entries(dict[str, Entry]):
    """Objects in a directory by name, and the time of the last change: a count of all changes."""

    def __init__(self) -> None:
        super().__init__()
        self.changed = next(_changes)

    def __setitem__(self, name: str, node: Entry) -> None:
        super().__setitem__(name, node)
        self.changed = next(_changes)

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        self.changed = next(_changes)


class MemoryFile(File):
    """An open file of a `MemoryBackend`. A transfer is done before its call returns."""

    def __init__(self, tree: Tree, path: str, node: RegularNode, *, writable: bool) -> None:
        self.path = path
        self._tree = tree
        self._node = node
        self._writable = writable
        self._closed = False
        node.num_open += 1
        tree.files.add(self)

    @property
    def size_bytes(self) -> int:
        return len(self._node.data)

    @property
    def inode(self) -> int:
        return self._node.inode

    @property
    def alignment(self) -> int:
        return 1

    @property
    def direct(self) -> bool:
        return False

    def read(self, into: Buffer, offset: int) -> Pending[int]:
        self._check("read", into.nbytes, offset)
        return self._done("read", into.nbytes, partial(self._read, into.memoryview(), offset))

    def read_again(self, into: Buffer, offset: int, *, direct: bool) -> Pending[int]:  # noqa: ARG002
        return self.read(into, offset)

    def write(self, source: Buffer, offset: int) -> Pending[int]:
        self._check("write", source.nbytes, offset)
        return self._done("write", source.nbytes, partial(self._write, source.memoryview(), offset))

    def read_bytes(self, offset: int, nbytes: int) -> bytes:
        self._check("read", nbytes, offset)
        if nbytes < 0 or offset + nbytes > self.size_bytes:  # checked before the allocation
            raise self._short(nbytes, offset)
        data = bytearray(nbytes)
        self._read(memoryview(data), offset)
        return bytes(data)

    def write_bytes(self, data: bytes, offset: int) -> None:
        self._check("write", len(data), offset)
        self._write(memoryview(data), offset)

    def clone(self, source: File, offset: int, nbytes: int) -> bool:
        self._check("write", nbytes, offset)
        if not self._tree.clones or not isinstance(source, MemoryFile):
            return False
        source._check("clone", 0, offset)
        if (offset | nbytes) % ALIGNMENT or offset + nbytes > source.size_bytes:
            return False
        with memoryview(source._node.data) as data:
            self._write(data[offset : offset + nbytes], offset)
        return True

    def sync(self) -> None:
        self._check("sync", 0, 0)
        self._tree.meters["sync"].count(0)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            with self._tree.guard:
                self._tree.files.discard(self)
                self._node.num_open -= 1
                self._tree.free_if_unused(self._node)

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"MemoryFile({self.path!r}, {self.size_bytes} bytes{state})"

    def _check(self, what: Direction | str, nbytes: int, offset: int) -> None:
        self._tree.check(what, self.path)
        if self._closed:
            raise StorageError(errno.EBADF, f"{what}: this file is closed", self.path)
        check_request(
            what, self.path, offset, nbytes, writable=self._writable, size_bytes=self.size_bytes
        )

    def _done(self, direction: Direction, nbytes: int, move: Callable[[], None]) -> Pending[int]:
        """Run a transfer, and return its future, which has resolved."""
        future: Pending[int] = Pending()
        try:
            with self._tree.meters[direction].transfer(nbytes):
                move()
        except StorageError as error:
            future.set_exception(error)
        else:
            future.set_result(nbytes)
        return future

    def _read(self, view: memoryview, offset: int) -> None:
        """Copy bytes of the file into `view`; raises `ShortReadError` if the file ends early."""
        # A slice of a bytearray would be a copy; a slice of a view is not. The view is released,
        # because the file's bytes cannot be dropped while a view of them exists.
        with memoryview(self._node.data) as data:
            found = data[offset : offset + len(view)]
            view[: len(found)] = found
        if len(found) < len(view):
            raise self._short(len(view), offset)

    def _write(self, view: memoryview, offset: int) -> None:
        with memoryview(self._node.data) as data:
            data[offset : offset + len(view)] = view

    def _short(self, nbytes: int, offset: int) -> ShortReadError:
        what = f"read of {nbytes} bytes from a file of {self.size_bytes}"
        return ShortReadError(errno.ENODATA, what, self.path, offset=offset)


class MemoryLock:
    """A held lock on a node."""

    def __init__(self, tree: Tree, node: Node, path: str, *, shared: bool) -> None:
        self._tree = tree
        self._node = node
        self._path = path
        self._shared = shared
        if shared:
            node.num_shared += 1
        else:
            node.exclusive = True
        tree.held.add(self)

    def is_current(self) -> bool:
        with self._tree.guard:
            return (
                self in self._tree.held
                and self._tree.named("check the lock", self._path) is self._node
            )

    def release(self) -> None:
        with self._tree.guard:
            if self not in self._tree.held:
                return
            self._tree.held.discard(self)
            if self._shared:
                self._node.num_shared -= 1
            else:
                self._node.exclusive = False


class Tree:
    """The names of a memory backend, with all that its files and locks share with it."""

    def __init__(self, capacity_bytes: int | None, *, clones: bool) -> None:
        self.root = DirectoryNode()
        self.capacity_bytes = capacity_bytes
        self.clones = clones
        self.guard = threading.RLock()
        self.used_bytes = 0
        self.is_closed = False
        self.files: set[MemoryFile] = set()
        self.held: set[MemoryLock] = set()
        self.meters = Meters()

    def check(self, what: str, path: str) -> None:
        """Raise `StorageError` (EBADF) if the backend is closed."""
        if self.is_closed:
            raise StorageError(errno.EBADF, f"{what}: this backend is closed", path)

    def free_bytes(self) -> int:
        """Return the bytes left of the capacity; `sys.maxsize` if it has no limit."""
        return sys.maxsize if self.capacity_bytes is None else self.capacity_bytes - self.used_bytes

    def free_if_unused(self, node: RegularNode) -> None:
        """Free the bytes of a file that has no name and is not open."""
        if node.num_names == 0 and node.num_open == 0:
            self.used_bytes -= len(node.data)
            node.data = bytearray()

    def existing(self, what: str, path: str) -> Entry:
        """Return the node that a path names; `what` is the operation, for messages."""
        self.check(what, path)
        node: Entry = self.root
        for part in parts_of(path):
            if not isinstance(node, DirectoryNode):
                raise StorageError(errno.ENOTDIR, what, path)
            if part not in node.entries:
                raise StorageError(errno.ENOENT, what, path)
            node = node.entries[part]
        return node

    def named(self, what: str, path: str) -> Entry | None:
        """Return the node that a path names, or None if the path does not exist."""
        try:
            return self.existing(what, path)
        except StorageError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                return None
            raise

    def directory(self, what: str, path: str) -> DirectoryNode:
        node = self.existing(what, path)
        if not isinstance(node, DirectoryNode):
            raise StorageError(errno.ENOTDIR, what, path)
        return node

    def parent(self, what: str, path: str) -> tuple[DirectoryNode, str]:
        """Return the parent directory of a path, which need not exist, and the last part of it."""
        self.check(what, path)
        parts = parts_of(path)
        if not parts:
            raise StorageError(errno.EBUSY, f"{what}: this is the root", path)
        try:
            return self.directory(what, "/" + "/".join(parts[:-1])), parts[-1]
        except StorageError as error:
            raise StorageError(error.errno or errno.EIO, what, path) from None


def parts_of(path: str) -> list[str]:
    """Return the names in an absolute path; empty for the root."""
    if not path.startswith("/"):
        raise ValueError(f"the memory backend has no current directory: {path!r} is relative")
    return [part for part in posixpath.normpath(path).split("/") if part]
