"""A backend that remembers what it did, and a disk whose power can be cut after any of it.

`CrashBackend` keeps files in memory and logs every operation that changes something. `Disk` takes
the operations one by one and, at any point, says what a machine could find after losing its power
just then. A run is recorded once, and every moment of it is then tried:

    backend = CrashBackend()
    train(backend)
    disk = Disk()
    for operation in backend.log:
        disk.apply(operation)
        survivor = disk.power_cut(rng).backend()  # a backend for the next process

The model is harsher than any one file system:

- Data of a write is on the platter after a `sync` of that file. Until then, each 4096-byte page of
  each write has survived or not, independently of all others; in one state of four it is each
  512-byte sector, so that pages are torn as well.
- So has the size of a file: until its first `sync` it may be found with any length in pages.
- A name that was made, moved, exchanged or removed is on the platter after a `sync_dir` of its
  directory, and so are all changes of that directory before it. Of later changes either the first
  few have survived, as with a journal, or any of them, in order. `sync` of a file does nothing for
  its name, and `sync_dir` nothing for data, nor for the name of the directory itself.

A clone of a range is a write of the bytes that it takes over.

A process that is killed loses nothing of this: the cache is the kernel's. `CrashBackend.resumed`
gives its successor the same files with the same changes still in the cache.
"""

from __future__ import annotations

import posixpath
import random
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from gds import Buffer, IOFuture, MemoryBackend, WrapperBackend
from gds.backends.wrapper import WrapperFile
from gds.contract import File, Lock

PAGE_BYTES: Final = 4096
"""The unit in which a cache writes back, and in which files grow."""

SECTOR_BYTES: Final = 512
"""The unit in which a drive writes: of a page that was on its way, any sectors may have arrived."""

Kind = Literal[
    "create", "write", "sync", "make_dir", "rename", "exchange", "remove", "remove_dir", "sync_dir",
    "link", "note",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Operation:
    """One change that a backend was asked for, or a note of the test's."""

    kind: Kind
    node: int = 0
    """The file or directory that is created, written or synced, as its inode number."""

    path: str = ""
    other: str = ""
    """The second path of `rename` and `exchange`; of `link`, the name that the file had before."""

    offset: int = 0
    data: bytes = b""
    size_bytes: int = 0
    label: object = None
    """What a note says."""

    def __str__(self) -> str:
        what = {
            "write": f" {len(self.data)} bytes at {self.offset}",
            "rename": f" to {self.other}",
            "exchange": f" with {self.other}",
            "note": f" {self.label}",
        }.get(self.kind, "")
        return f"{self.kind} {self.path}{what}"


class CrashBackend(WrapperBackend):
    """Files in memory, and a log of everything that was done to them."""

    def __init__(self, *, clones: bool = False) -> None:
        super().__init__(MemoryBackend(clones=clones))
        self.log: list[Operation] = []
        self.order = threading.RLock()
        """Held while an operation takes effect and is logged: the log is the order of effects."""

    @classmethod
    def resumed(cls, log: Iterable[Operation], *, clones: bool = False) -> CrashBackend:
        """Return the backend of a process that follows one that was killed after `log`."""
        backend = cls(clones=clones)
        files: dict[int, File] = {}
        for operation in log:
            match operation.kind:
                case "create":
                    files[operation.node] = backend.create(operation.path, operation.size_bytes)
                case "write":
                    files[operation.node].write_bytes(operation.data, operation.offset)
                case "sync":
                    files[operation.node].sync()
                case "make_dir" | "remove" | "remove_dir" | "sync_dir":
                    getattr(backend, operation.kind)(operation.path)
                case "rename" | "exchange":
                    getattr(backend, operation.kind)(operation.path, operation.other)
                case "link":
                    backend.link(operation.other, operation.path)
                case "note":
                    backend.note(operation.label)
        for file in files.values():
            file.close()
        return backend

    @classmethod
    def after(cls, image: Image, *, clones: bool = False) -> CrashBackend:
        """Return the backend of a process that starts on what a loss of power has left."""
        backend = cls(clones=clones)
        for directory in image.directories:
            backend.make_dir(directory)
        for path, data in image.files:
            file = backend.create(path, len(data))
            if data:
                file.write_bytes(data, 0)
            file.sync()
            file.close()
        for directory in ("/", *image.directories):
            backend.sync_dir(directory)
        return backend

    def note(self, label: object) -> None:
        """Put a note into the log: what is true from now on."""
        with self.order:
            self.log.append(Operation("note", label=label))

    def wrap_file(self, file: File) -> File:
        """Return a file that logs."""
        return _CrashFile(file, self._node(file.path), self)

    def create(self, path: str, size_bytes: int) -> File:
        """Create a file, and log it."""
        with self.order:
            file = super().create(path, size_bytes)
            self._done("create", path, size_bytes=size_bytes)
            return file

    def make_dir(self, path: str) -> None:
        """Make a directory, and log it."""
        with self.order:
            super().make_dir(path)
            self._done("make_dir", path)

    def rename(self, source: str, target: str) -> None:
        """Rename, and log it."""
        with self.order:
            node = self._node(source)
            super().rename(source, target)
            self.log.append(Operation("rename", node, source, target))

    def exchange(self, a: str, b: str) -> None:
        """Exchange, and log it."""
        with self.order:
            super().exchange(a, b)
            self._done("exchange", a, other=b)

    def link(self, source: str, path: str) -> None:
        """Give a file a second name, as somebody beside the process does, and log it."""
        assert isinstance(self.inner, MemoryBackend)
        with self.order:
            self.inner.link(source, path)
            self._done("link", path, other=source)

    def remove(self, path: str) -> None:
        """Remove a file, and log it."""
        with self.order:
            node = self._node(path)
            super().remove(path)
            self.log.append(Operation("remove", node, path))

    def remove_dir(self, path: str) -> None:
        """Remove a directory, and log it."""
        with self.order:
            node = self._node(path)
            super().remove_dir(path)
            self.log.append(Operation("remove_dir", node, path))

    def sync_dir(self, path: str) -> None:
        """Make the names in a directory durable, and log it."""
        with self.order:
            super().sync_dir(path)
            self._done("sync_dir", path)

    def lock(self, path: str, *, shared: bool = False, create: bool = False) -> Lock:
        """Lock; logs the file if that makes one."""
        with self.order:
            missing = create and self.stat(path) is None
            lock = super().lock(path, shared=shared, create=create)
            if missing:
                self._done("create", path)
            return lock

    def changed(self, kind: Literal["write", "sync"], file: _CrashFile, **what: object) -> None:
        """Log what was done to a file; called with `order` held."""
        self.log.append(Operation(kind, file.node, file.path, **what))  # type: ignore[arg-type]

    def _node(self, path: str) -> int:
        found = self.inner.stat(path)
        if found is None:
            raise FileNotFoundError(path)
        return found.inode

    def _done(self, kind: Kind, path: str, *, other: str = "", size_bytes: int = 0) -> None:
        node = self._node(path)
        self.log.append(Operation(kind, node, path, other, size_bytes=size_bytes))


class _CrashFile(WrapperFile):
    """Forwards, and logs what changes the file."""

    def __init__(self, inner: File, node: int, backend: CrashBackend) -> None:
        super().__init__(inner)
        self.node = node
        self._backend = backend

    def write(self, source: Buffer, offset: int) -> IOFuture:
        with self._backend.order:
            future = super().write(source, offset)
            self._backend.changed("write", self, data=bytes(source.memoryview()), offset=offset)
            return future

    def write_bytes(self, data: bytes, offset: int) -> None:
        with self._backend.order:
            super().write_bytes(data, offset)
            self._backend.changed("write", self, data=bytes(data), offset=offset)

    def clone(self, source: File, offset: int, nbytes: int) -> bool:
        with self._backend.order:
            done = super().clone(source, offset, nbytes)
            if done:
                data = self.inner.read_bytes(offset, nbytes)
                self._backend.changed("write", self, data=data, offset=offset)
            return done

    def sync(self) -> None:
        with self._backend.order:
            super().sync()
            self._backend.changed("sync", self)


_Change = tuple[Kind, str, str, int]
"""Kind, name, other name and node of one change of a directory."""


@dataclass(slots=True)
class _FileNode:
    """A file as the platter and the cache have it."""

    size_bytes: int
    platter: bytearray
    synced: bool = False
    """Whether its size is on the platter."""

    cache: list[Operation] = field(default_factory=list)


@dataclass(slots=True)
class _DirectoryNode:
    """A directory as the platter and the cache have it."""

    platter: dict[str, int] = field(default_factory=dict)
    cache: list[_Change] = field(default_factory=list)
    """Changes since the last sync."""


@dataclass(frozen=True, slots=True)
class Image:
    """What a machine finds after a loss of power: directories, and files with their bytes."""

    directories: tuple[str, ...]
    files: tuple[tuple[str, bytes], ...]

    def backend(self) -> MemoryBackend:
        """Return a backend with this content."""
        backend = MemoryBackend(directories=self.directories)
        for path, data in self.files:
            file = backend.create(path, len(data))
            if data:
                file.write_bytes(data, 0)
            file.close()
        return backend


class Disk:
    """The platter and the cache, after the operations applied so far."""

    def __init__(self, log: Iterable[Operation] = ()) -> None:
        self._root = _DirectoryNode()
        self._directories: dict[int, _DirectoryNode] = {}
        self._files: dict[int, _FileNode] = {}
        self._visible: dict[str, int] = {}
        """Every directory that the running process sees, by path."""
        for operation in log:
            self.apply(operation)

    def apply(self, operation: Operation) -> None:
        """Do one operation."""
        match operation.kind:
            case "create":
                size = operation.size_bytes
                self._files[operation.node] = _FileNode(size, bytearray(size))
                self._change(operation)
            case "write":
                self._files[operation.node].cache.append(operation)
            case "sync":
                file = self._files[operation.node]
                file.synced = True
                for write in file.cache:
                    stop = write.offset + len(write.data)
                    file.platter[write.offset : stop] = write.data
                file.cache.clear()
            case "sync_dir":
                directory = self._directory(operation.path)
                for change in directory.cache:
                    self._apply_change(directory.platter, change)
                directory.cache.clear()
            case "make_dir":
                self._directories[operation.node] = _DirectoryNode()
                self._change(operation)
                self._visible[operation.path] = operation.node
            case "link":
                self._change(replace(operation, other=""))
            case "rename" | "exchange" | "remove" | "remove_dir":
                self._change(operation)
                self._move(operation)

    @property
    def num_unsynced(self) -> int:
        """Writes and changes of names that a loss of power could undo."""
        directories = (self._root, *self._directories.values())
        return sum(len(d.cache) for d in directories) + sum(
            len(f.cache) for f in self._files.values()
        )

    def power_cut(self, rng: random.Random) -> Image:
        """Choose one of the states that the platter may be in now, and return it."""
        # Extremes are likelier than chance would make them: they are where protocols break.
        names = rng.choice((0.0, 0.5, 0.5, 1.0))
        pages = rng.choice((0.0, 0.5, 0.9, 1.0))
        sizes = rng.choice((0.0, 0.5, 1.0))
        unit = SECTOR_BYTES if rng.random() < 0.25 else PAGE_BYTES
        journal = rng.random() < 0.5
        directories: list[str] = []
        files: list[tuple[str, bytes]] = []
        pending = [("", self._root)]
        while pending:
            path, directory = pending.pop()
            entries = dict(directory.platter)
            for change in _surviving_changes(directory.cache, names, journal, rng):
                self._apply_change(entries, change)
            for name, node in sorted(entries.items()):
                if node in self._directories:
                    directories.append(f"{path}/{name}")
                    pending.append((f"{path}/{name}", self._directories[node]))
                else:
                    data = _surviving(self._files[node], pages, sizes, unit, rng)
                    files.append((f"{path}/{name}", data))
        return Image(tuple(directories), tuple(files))

    def _directory(self, path: str) -> _DirectoryNode:
        return self._directories[self._visible[path]] if path != "/" else self._root

    def _change(self, operation: Operation) -> None:
        parent, name = posixpath.split(operation.path)
        other_parent, other = posixpath.split(operation.other or operation.path)
        if parent != other_parent:
            raise NotImplementedError(f"{operation}: between two directories")
        self._directory(parent).cache.append((operation.kind, name, other, operation.node))

    def _apply_change(self, entries: dict[str, int], change: _Change) -> None:
        """Change names; what makes no sense without a change that was lost is lost as well."""
        kind, name, other, node = change
        if kind in ("create", "make_dir", "link"):
            entries.setdefault(name, node)
        elif kind == "exchange":
            if name in entries and other in entries:
                entries[name], entries[other] = entries[other], entries[name]
        elif entries.get(name) != node:
            return
        elif kind != "rename":
            del entries[name]
        elif other not in entries or node in self._files:  # no directory replaces anything
            entries[other] = entries.pop(name)

    def _move(self, operation: Operation) -> None:
        """Follow what the process sees: directories by path, those inside them included."""
        swaps = {operation.path: operation.other}
        if operation.kind == "exchange":
            swaps[operation.other] = operation.path
        moved = {}
        for path, node in self._visible.items():
            new: str | None = path
            for old, other in swaps.items():
                if path == old or path.startswith(f"{old}/"):
                    new = other + path[len(old) :] if other else None
            if new is not None:
                moved[new] = node
        self._visible = moved


def _surviving_changes(
    cache: Sequence[_Change], chance: float, journal: bool, rng: random.Random
) -> list[_Change]:
    if not cache or chance in (0.0, 1.0):
        return list(cache) if chance else []
    if journal:
        return list(cache[: rng.randrange(len(cache) + 1)])
    return [change for change in cache if rng.random() < chance]


def _surviving(file: _FileNode, pages: float, sizes: float, unit: int, rng: random.Random) -> bytes:
    """Return a file's bytes: `pages` and `sizes` are the chances of what is not on the platter.

    `unit` is the number of bytes that survive, or do not, as one.
    """
    if not file.cache and file.synced:
        return bytes(file.platter)
    data = bytearray(file.platter)
    for write in file.cache:
        stop = write.offset + len(write.data)
        start = write.offset
        while start < stop:
            end = min(start // unit * unit + unit, stop)
            if pages == 1.0 or (pages and rng.random() < pages):
                data[start:end] = write.data[start - write.offset : end - write.offset]
            start = end
    if not file.synced and sizes < 1.0 and rng.random() >= sizes:
        num_pages = -(-file.size_bytes // PAGE_BYTES)
        del data[rng.randrange(num_pages + 1) * PAGE_BYTES :]
    return bytes(data)
