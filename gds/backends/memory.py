"""Backend in process memory: files, names and locks without a disk."""
# ruff: noqa: D102 - the protocols of `gds.contract` document the methods

from __future__ import annotations

import errno
import posixpath
from collections.abc import Iterable

from gds.backends.memory_files import (
    DirectoryNode,
    MemoryFile,
    MemoryLock,
    Node,
    RegularNode,
    Tree,
    parts_of,
)
from gds.buffers.host import HostBuffer, host_buffer
from gds.contract import Backend, BufferKind, Capabilities, Counters, Stat
from gds.errors import LockHeldError, StorageError


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
        self._tree = Tree(capacity_bytes, clones=clones)
        self._lock = self._tree.guard
        for path in directories:
            parent = "/"
            for part in parts_of(path):
                parent = posixpath.join(parent, part)
                if self.stat(parent) is None:
                    self.make_dir(parent)

    def reopened(self) -> MemoryBackend:
        """Close this backend, and return a new one with the same names and bytes.

        This simulates a new process after an orderly end, not a loss of power: all data written is
        kept, synced or not. The totals start at zero.
        """
        self.close()
        old = self._tree
        successor = MemoryBackend(capacity_bytes=old.capacity_bytes, clones=old.clones)
        successor._tree.root, successor._tree.used_bytes = old.root, old.used_bytes
        return successor

    def capabilities(self, directory: str) -> Capabilities:
        with self._lock:
            self._tree.directory("probe", directory)
        return Capabilities(
            backend=self.name,
            filesystem="memory",
            direct=False,
            alignment=1,
            volatile=True,
            remote=False,
            device_memory=False,
            reason="files are in process memory: there is no device to transfer to",
            clones=self._tree.clones,
        )

    def allocate(self, nbytes: int, kind: BufferKind | None = None) -> HostBuffer:
        self._tree.check("allocate", self.name)
        return host_buffer(self.name, nbytes, kind)

    def create(self, path: str, size_bytes: int) -> MemoryFile:
        if size_bytes < 0:
            raise ValueError(f"a file cannot have {size_bytes} bytes: {path!r}")
        with self._lock:
            parent, name = self._tree.parent("create", path)
            if name in parent.entries:
                raise StorageError(errno.EEXIST, "create", path)
            if size_bytes > self._tree.free_bytes():
                raise StorageError(errno.ENOSPC, f"reserve {size_bytes} bytes", path)
            node = parent.entries[name] = RegularNode(size_bytes)
            self._tree.used_bytes += size_bytes
            return MemoryFile(self._tree, path, node, writable=True)

    def open(self, path: str, *, writable: bool = False) -> MemoryFile:
        with self._lock:
            node = self._tree.existing("open", path)
            if isinstance(node, DirectoryNode):
                raise StorageError(errno.EISDIR, "open: not a regular file", path)
            return MemoryFile(self._tree, path, node, writable=writable)

    def stat(self, path: str) -> Stat | None:
        with self._lock:
            node = self._tree.named("stat", path)
            if node is None:
                return None
            if isinstance(node, DirectoryNode):
                return Stat("directory", 0, node.inode, 1, node.entries.changed)
            return Stat("file", len(node.data), node.inode, node.num_names)

    def list_dir(self, path: str) -> list[str]:
        with self._lock:
            return sorted(self._tree.directory("list", path).entries)

    def make_dir(self, path: str) -> None:
        with self._lock:
            parent, name = self._tree.parent("make directory", path)
            if name in parent.entries:
                raise StorageError(errno.EEXIST, "make directory", path)
            parent.entries[name] = DirectoryNode()

    def rename(self, source: str, target: str) -> None:
        what = f"rename to {target!r}"
        with self._lock:
            node = self._tree.existing(what, source)
            old_parent, old_name = self._tree.parent(what, source)
            new_parent, new_name = self._tree.parent(what, target)
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
            node_a, node_b = self._tree.existing(what, a), self._tree.existing(what, b)
            parent_a, name_a = self._tree.parent(what, a)
            parent_b, name_b = self._tree.parent(what, b)
            if _inside(node_a, parent_b) or _inside(node_b, parent_a):
                raise StorageError(errno.EINVAL, f"{what}: one is inside the other", a)
            parent_a.entries[name_a], parent_b.entries[name_b] = node_b, node_a

    def remove(self, path: str) -> None:
        with self._lock:
            node = self._tree.existing("remove", path)
            if isinstance(node, DirectoryNode):
                raise StorageError(errno.EISDIR, "remove", path)
            parent, name = self._tree.parent("remove", path)
            del parent.entries[name]
            self._unname(node)

    def remove_dir(self, path: str) -> None:
        with self._lock:
            if self._tree.directory("remove directory", path).entries:
                raise StorageError(errno.ENOTEMPTY, "remove directory", path)
            parent, name = self._tree.parent("remove directory", path)
            del parent.entries[name]

    def link(self, source: str, path: str) -> None:
        """Give a file a second name, as ``ln`` does. This is not in the contract; tests use it."""
        with self._lock:
            node = self._tree.existing("link", source)
            parent, name = self._tree.parent("link", path)
            if isinstance(node, DirectoryNode):
                raise StorageError(errno.EPERM, "link", source)
            if name in parent.entries:
                raise StorageError(errno.EEXIST, "link", path)
            parent.entries[name] = node
            node.num_names += 1

    def sync_dir(self, path: str) -> None:
        with self._lock:
            self._tree.directory("sync directory", path)

    def lock(self, path: str, *, shared: bool = False, create: bool = False) -> MemoryLock:
        with self._lock:
            is_root = not parts_of(path)
            parent, name = (self._tree.root, "") if is_root else self._tree.parent("lock", path)
            if create and name not in parent.entries:
                parent.entries[name] = RegularNode(0)
            node = self._tree.existing("lock", path)
            if node.exclusive or (node.num_shared and not shared):
                kind = "a shared" if shared else "an exclusive"
                raise LockHeldError(errno.EWOULDBLOCK, f"take {kind} lock: it is held", path)
            return MemoryLock(self._tree, node, path, shared=shared)

    def free_bytes(self, directory: str) -> int:
        """Return the bytes left of the capacity; `sys.maxsize` if it has no limit."""
        with self._lock:
            self._tree.directory("free space", directory)
            return self._tree.free_bytes()

    def counters(self) -> Counters:
        return self._tree.meters.counters()

    def close(self) -> None:
        """Release files and locks. Idempotent. The bytes stay until this object is collected."""
        for file in list(self._tree.files):
            file.close()
        for held in list(self._tree.held):
            held.release()
        self._tree.is_closed = True

    def _unname(self, node: RegularNode) -> None:
        node.num_names -= 1
        self._tree.free_if_unused(node)


def _inside(node: Node, directory: DirectoryNode) -> bool:
    """Return whether `directory` is the node itself or is inside it."""
    return isinstance(node, DirectoryNode) and node.holds(directory)
