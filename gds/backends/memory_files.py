"""Objects of the memory backend: nodes (files and directories), open files, and locks."""
# ruff: noqa: D102 - the protocols of `gds.contract` document the methods

from __future__ import annotations

import errno
import itertools
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

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


class Entries(dict[str, RegularNode | DirectoryNode]):
    """Objects in a directory by name, and the time of the last change: a count of all changes."""

    def __init__(self) -> None:
        super().__init__()
        self.changed = next(_changes)

    def __setitem__(self, name: str, node: RegularNode | DirectoryNode) -> None:
        super().__setitem__(name, node)
        self.changed = next(_changes)

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        self.changed = next(_changes)


class MemoryFile(File):
    """An open file of a `MemoryBackend`. A transfer is done before its call returns."""

    def __init__(
        self,
        path: str,
        node: RegularNode,
        *,
        writable: bool,
        meters: Meters,
        check_usable: Callable[[str, str], None],
        closed: Callable[[MemoryFile, RegularNode], None],
        clones: bool,
    ) -> None:
        self.path = path
        self._node = node
        self._writable = writable
        self._meters = meters
        self._check_usable = check_usable
        self._report_closed = closed
        self._clones = clones
        self._closed = False

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
        if not self._clones or not isinstance(source, MemoryFile):
            return False
        source._check("clone", 0, offset)
        if (offset | nbytes) % ALIGNMENT or offset + nbytes > source.size_bytes:
            return False
        with memoryview(source._node.data) as data:
            self._write(data[offset : offset + nbytes], offset)
        return True

    def sync(self) -> None:
        self._check("sync", 0, 0)
        self._meters["sync"].count(0)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._report_closed(self, self._node)

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"MemoryFile({self.path!r}, {self.size_bytes} bytes{state})"

    def _check(self, what: Direction | str, nbytes: int, offset: int) -> None:
        self._check_usable(what, self.path)
        if self._closed:
            raise StorageError(errno.EBADF, f"{what}: this file is closed", self.path)
        check_request(
            what, self.path, offset, nbytes, writable=self._writable, size_bytes=self.size_bytes
        )

    def _done(self, direction: Direction, nbytes: int, move: Callable[[], None]) -> Pending[int]:
        """Run a transfer, and return its future, which has resolved."""
        future: Pending[int] = Pending()
        try:
            with self._meters[direction].transfer(nbytes):
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

    def __init__(
        self,
        node: Node,
        *,
        named: Callable[[], Node | None],
        shared: bool,
        held: set[MemoryLock],
        guard: threading.RLock,
    ) -> None:
        self._node = node
        self._named = named
        self._shared = shared
        self._held = held
        self._guard = guard
        if shared:
            node.num_shared += 1
        else:
            node.exclusive = True
        held.add(self)

    def is_current(self) -> bool:
        with self._guard:
            return self in self._held and self._named() is self._node

    def release(self) -> None:
        with self._guard:
            if self not in self._held:
                return
            self._held.discard(self)
            if self._shared:
                self._node.num_shared -= 1
            else:
                self._node.exclusive = False
