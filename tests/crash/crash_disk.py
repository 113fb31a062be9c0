"""A disk whose power can be cut after any operation; `tests.crash.crash_backend` says how it loses.

The model is harsher than any one file system:

- Data of a write is on the platter after a `sync` of that file. Until then, each 4096-byte page of
  each write has survived or not, independently of all others; in one state of four it is each
  512-byte sector, so that pages are torn as well.
- So has the size of a file: until its first `sync` it may be found with any length in pages.
- A name that was made, moved, exchanged or removed is on the platter after a `sync_dir` of its
  directory, and so are all changes of that directory before it. Of later changes either the first
  few have survived, as with a journal, or any of them, in order. A file that was moved between two
  directories may be found in one of them, in both, or in none. `sync` of a file does nothing for
  its name, and `sync_dir` nothing for data, nor for the name of the directory itself.

A clone of a range is a write of the bytes that it takes over.
"""

from __future__ import annotations

import posixpath
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from gds import Backend, MemoryBackend
from tests.stores.files import everything

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

    @classmethod
    def of(cls, backend: Backend) -> Image:
        """Return everything that a backend has, for as many backends as are wanted."""
        found = everything(backend)
        files = tuple((path, data) for path, data in found.items() if data is not None)
        return cls(tuple(path for path, data in found.items() if data is None), files)

    def backend(self, *, clones: bool = False) -> MemoryBackend:
        """Return a backend with this content."""
        backend = MemoryBackend(directories=self.directories, clones=clones)
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

    def power_cut(
        self, rng: random.Random, *, names: float | None = None, pages: float | None = None
    ) -> Image:
        """Choose one of the states that the platter may be in now, and return it.

        Args:
            rng: Chooses.
            names: Chance of each change of a name to survive; None to choose one.
            pages: The same of each page of a write.
        """
        # Extremes are likelier than chance would make them: they are where protocols break.
        names = rng.choice((0.0, 0.5, 0.5, 1.0)) if names is None else names
        pages = rng.choice((0.0, 0.5, 0.9, 1.0)) if pages is None else pages
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
            assert operation.node in self._files, f"{operation}: between two directories"
            self._directory(other_parent).cache.append(("link", other, other, operation.node))
            self._directory(parent).cache.append(("remove", name, name, operation.node))
            return
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


def moments(log: Iterable[Operation], first: Any = None) -> Iterator[tuple[Disk, Operation, Any]]:
    """Yield the disk after each operation of a log, and what was noted last; until then `first`."""
    disk, noted = Disk(), first
    for operation in log:
        disk.apply(operation)
        noted = operation.label if operation.kind == "note" else noted
        yield disk, operation, noted
