"""Backend in process memory: files, names and locks without a disk."""
# ruff: noqa: D102 - the protocols of `gds.contract` document the methods

from __future__ import annotations

import errno
import posixpath
import sys
import threading
from collections.abc import Iterable
from functools import partial
from typing import TypeAlias

from gds.backends.memory_files import DirectoryNode, MemoryFile, MemoryLock, RegularNode
from gds.backends.threads import Meters
from gds.buffers.host import HostBuffer, host_buffer
from gds.contract import Backend, BufferKind, Capabilities, Counters, Stat
from gds.errors import LockHeldError, StorageError

_Entry: TypeAlias = RegularNode | DirectoryNode


class MemoryBackend(Backend):
    """A backend for tests and demonstrations, whose files are lost with the process.

    It has the semantics of `PosixBackend`, down to the error numbers. A transfer is done before its
    call returns, so that runs are reproducible; the returned future has resolved. Paths must be
    absolute. Methods may be called from any thread.
    """

    name: str = "memory"

    def __init__(
        self,
        *,
        directories: Iterable[str] = (),
        capacity_bytes: int | None = None,
        clones: bool = False,
    ) -> None:
        """Make a backend that holds only the directory ``/`` and `directories`.

        Args:
            directories: Absolute paths of directories to make, with their parents.
            capacity_bytes: Capacity of all files together, in bytes; `create` fails with ENOSPC
                beyond it. A removed file uses capacity until it is closed. None is no limit.
            clones: Whether `File.clone` works, as on a file system that can share space.
        """
        self._root = DirectoryNode()
        self._capacity_bytes = capacity_bytes
        self._clones = clones
        self._lock = threading.RLock()
        self._used_bytes = 0
        self._closed = False
        self._files: set[MemoryFile] = set()
        self._held: set[MemoryLock] = set()
        self._meters = Meters()
        for path in directories:
            parent = "/"
            for part in _parts(path):
                parent = posixpath.join(parent, part)
                if self.stat(parent) is None:
                    self.make_dir(parent)

    def reopened(self) -> MemoryBackend:
        """Close this backend, and return a new one with the same names and bytes.

        This simulates a new process after an orderly end, not a loss of power: all data written is
        kept, synced or not. The totals start at zero.
        """
        self.close()
        successor = MemoryBackend(capacity_bytes=self._capacity_bytes, clones=self._clones)
        successor._root = self._root
        successor._used_bytes = self._used_bytes
        return successor

    def capabilities(self, directory: str) -> Capabilities:
        with self._lock:
            self._directory("probe", directory)
        return Capabilities(
            backend=self.name,
            filesystem="memory",
            direct=False,
            alignment=1,
            volatile=True,
            remote=False,
            device_memory=False,
            reason="files are in process memory: there is no device to transfer to",
            clones=self._clones,
        )

    def allocate(self, nbytes: int, kind: BufferKind | None = None) -> HostBuffer:
        self._check("allocate", self.name)
        return host_buffer(self.name, nbytes, kind)

    def create(self, path: str, size_bytes: int) -> MemoryFile:
        if size_bytes < 0:
            raise ValueError(f"a file cannot have {size_bytes} bytes: {path!r}")
        with self._lock:
            parent, name = self._parent("create", path)
            if name in parent.entries:
                raise StorageError(errno.EEXIST, "create", path)
            if size_bytes > self._free_bytes():
                raise StorageError(errno.ENOSPC, f"reserve {size_bytes} bytes", path)
            node = parent.entries[name] = RegularNode(size_bytes)
            self._used_bytes += size_bytes
            return self._opened(node, path, writable=True)

    def open(self, path: str, *, writable: bool = False) -> MemoryFile:
        with self._lock:
            node = self._existing("open", path)
            if isinstance(node, DirectoryNode):
                raise StorageError(errno.EISDIR, "open: not a regular file", path)
            return self._opened(node, path, writable=writable)

    def stat(self, path: str) -> Stat | None:
        with self._lock:
            node = self._named("stat", path)
            if node is None:
                return None
            if isinstance(node, DirectoryNode):
                return Stat("directory", 0, node.inode, 1, node.entries.changed)
            return Stat("file", len(node.data), node.inode, node.num_names)

    def list_dir(self, path: str) -> list[str]:
        with self._lock:
            return sorted(self._directory("list", path).entries)

    def make_dir(self, path: str) -> None:
        with self._lock:
            parent, name = self._parent("make directory", path)
            if name in parent.entries:
                raise StorageError(errno.EEXIST, "make directory", path)
            parent.entries[name] = DirectoryNode()

    def rename(self, source: str, target: str) -> None:
        what = f"rename to {target!r}"
        with self._lock:
            node = self._existing(what, source)
            old_parent, old_name = self._parent(what, source)
            new_parent, new_name = self._parent(what, target)
            replaced = new_parent.entries.get(new_name)
            if isinstance(node, DirectoryNode):
                if replaced is not None:
                    raise StorageError(errno.EEXIST, what, source)
                if node.holds(new_parent):
                    raise StorageError(errno.EINVAL, f"{what}, which is inside it", source)
            elif isinstance(replaced, DirectoryNode):
                raise StorageError(errno.EISDIR, what, source)
            elif replaced is node:
                return
            if isinstance(replaced, RegularNode):
                self._unname(replaced)
            del old_parent.entries[old_name]
            new_parent.entries[new_name] = node

    def exchange(self, a: str, b: str) -> None:
        what = f"exchange with {b!r}"
        with self._lock:
            node_a, node_b = self._existing(what, a), self._existing(what, b)
            parent_a, name_a = self._parent(what, a)
            parent_b, name_b = self._parent(what, b)
            if _inside(node_a, parent_b) or _inside(node_b, parent_a):
                raise StorageError(errno.EINVAL, f"{what}: one is inside the other", a)
            parent_a.entries[name_a], parent_b.entries[name_b] = node_b, node_a

    def remove(self, path: str) -> None:
        with self._lock:
            node = self._existing("remove", path)
            if isinstance(node, DirectoryNode):
                raise StorageError(errno.EISDIR, "remove", path)
            parent, name = self._parent("remove", path)
            del parent.entries[name]
            self._unname(node)

    def remove_dir(self, path: str) -> None:
        with self._lock:
            if self._directory("remove directory", path).entries:
                raise StorageError(errno.ENOTEMPTY, "remove directory", path)
            parent, name = self._parent("remove directory", path)
            del parent.entries[name]

    def link(self, source: str, path: str) -> None:
        """Give a file a second name, as ``ln`` does. This is not in the contract; tests use it."""
        with self._lock:
            node = self._existing("link", source)
            parent, name = self._parent("link", path)
            if isinstance(node, DirectoryNode):
                raise StorageError(errno.EPERM, "link", source)
            if name in parent.entries:
                raise StorageError(errno.EEXIST, "link", path)
            parent.entries[name] = node
            node.num_names += 1

    def sync_dir(self, path: str) -> None:
        with self._lock:
            self._directory("sync directory", path)

    def lock(self, path: str, *, shared: bool = False, create: bool = False) -> MemoryLock:
        with self._lock:
            parent, name = self._parent("lock", path) if _parts(path) else (self._root, "")
            if create and name not in parent.entries:
                parent.entries[name] = RegularNode(0)
            node = self._existing("lock", path)
            if node.exclusive or (node.num_shared and not shared):
                kind = "a shared" if shared else "an exclusive"
                raise LockHeldError(errno.EWOULDBLOCK, f"take {kind} lock: it is held", path)
            return MemoryLock(
                node,
                named=partial(self._named, "check the lock", path),
                shared=shared,
                held=self._held,
                guard=self._lock,
            )

    def free_bytes(self, directory: str) -> int:
        """Return the bytes left of the capacity; `sys.maxsize` if it has no limit."""
        with self._lock:
            self._directory("free space", directory)
            return self._free_bytes()

    def counters(self) -> Counters:
        return self._meters.counters()

    def close(self) -> None:
        """Release files and locks. Idempotent. The bytes stay until this object is collected."""
        for file in list(self._files):
            file.close()
        for held in list(self._held):
            held.release()
        self._closed = True

    def _check(self, what: str, path: str) -> None:
        if self._closed:
            raise StorageError(errno.EBADF, f"{what}: this backend is closed", path)

    def _opened(self, node: RegularNode, path: str, *, writable: bool) -> MemoryFile:
        """Return an open file on a node. The caller holds the lock."""
        node.num_open += 1
        file = MemoryFile(
            path,
            node,
            writable=writable,
            meters=self._meters,
            check_usable=self._check,
            closed=self._forget,
            clones=self._clones,
        )
        self._files.add(file)
        return file

    def _forget(self, file: MemoryFile, node: RegularNode) -> None:
        with self._lock:
            self._files.discard(file)
            node.num_open -= 1
            self._free_if_unused(node)

    def _free_bytes(self) -> int:
        if self._capacity_bytes is None:
            return sys.maxsize
        return self._capacity_bytes - self._used_bytes

    def _unname(self, node: RegularNode) -> None:
        node.num_names -= 1
        self._free_if_unused(node)

    def _free_if_unused(self, node: RegularNode) -> None:
        if node.num_names == 0 and node.num_open == 0:
            self._used_bytes -= len(node.data)
            node.data = bytearray()

    def _existing(self, what: str, path: str) -> _Entry:
        """Return the node that a path names; `what` is the operation, for messages."""
        self._check(what, path)
        node: _Entry = self._root
        for part in _parts(path):
            if not isinstance(node, DirectoryNode):
                raise StorageError(errno.ENOTDIR, what, path)
            if part not in node.entries:
                raise StorageError(errno.ENOENT, what, path)
            node = node.entries[part]
        return node

    def _named(self, what: str, path: str) -> _Entry | None:
        """Return the node that a path names, or None if the path does not exist."""
        try:
            return self._existing(what, path)
        except StorageError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                return None
            raise

    def _directory(self, what: str, path: str) -> DirectoryNode:
        node = self._existing(what, path)
        if not isinstance(node, DirectoryNode):
            raise StorageError(errno.ENOTDIR, what, path)
        return node

    def _parent(self, what: str, path: str) -> tuple[DirectoryNode, str]:
        """Return the parent directory of a path, and the last part of the path.

        The path itself need not exist.
        """
        self._check(what, path)
        parts = _parts(path)
        if not parts:
            raise StorageError(errno.EBUSY, f"{what}: this is the root", path)
        try:
            return self._directory(what, "/" + "/".join(parts[:-1])), parts[-1]
        except StorageError as error:
            raise StorageError(error.errno or errno.EIO, what, path) from None


def _parts(path: str) -> list[str]:
    if not path.startswith("/"):
        raise ValueError(f"the memory backend has no current directory: {path!r} is relative")
    return [part for part in posixpath.normpath(path).split("/") if part]


def _inside(node: _Entry, directory: DirectoryNode) -> bool:
    """Return whether `directory` is the node itself or is inside it."""
    return isinstance(node, DirectoryNode) and node.holds(directory)
