"""A backend that remembers what it did, so that its power can be lost after any of it.

`CrashBackend` keeps files in memory and logs every operation that changes something. A run is
recorded once, and every moment of it is then tried on `tests.crash.crash_disk.Disk`:

    backend = CrashBackend()
    train(backend)
    for disk, operation, promised in moments(backend.log):
        survivor = disk.power_cut(rng).backend()  # a backend for the next process

A process that is killed loses nothing that a power cut does: the cache is the kernel's.
`CrashBackend.resumed` gives its successor the same files with the same changes still in the cache.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, Literal

from gds import Buffer, IOFuture, MemoryBackend, WrapperBackend
from gds.backends.wrapper import WrapperFile
from gds.contract import File, Lock
from tests.crash.crash_disk import (
    PAGE_BYTES,
    SECTOR_BYTES,
    Disk,
    Image,
    Kind,
    Operation,
    moments,
)

__all__ = [
    "PAGE_BYTES",
    "SECTOR_BYTES",
    "CrashBackend",
    "Disk",
    "Image",
    "Operation",
    "moments",
]


def _logging(kind: Kind) -> Any:
    """Return a method that does an operation on names, and logs it."""

    def method(self: CrashBackend, path: str, *other: str) -> None:
        with self.order:
            found = self.inner.stat(path)
            getattr(self.inner, kind)(path, *other)
            found = found or self.inner.stat(path)
            assert found is not None
            self.log.append(Operation(kind, found.inode, path, *other))

    return method


class CrashBackend(WrapperBackend):
    """Files in memory, and a log of everything that was done to them."""

    make_dir = _logging("make_dir")
    rename = _logging("rename")
    exchange = _logging("exchange")
    remove = _logging("remove")
    remove_dir = _logging("remove_dir")
    sync_dir = _logging("sync_dir")

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
                case "link":
                    backend.link(operation.other, operation.path)
                case "note":
                    backend.note(operation.label)
                case kind:
                    names = [operation.path, operation.other]
                    getattr(backend, kind)(*(name for name in names if name))
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
        return _CrashFile(file, self._node(file.path), self)

    def create(self, path: str, size_bytes: int) -> File:
        with self.order:
            file = super().create(path, size_bytes)
            self._done("create", path, size_bytes=size_bytes)
            return file

    def link(self, source: str, path: str) -> None:
        """Give a file a second name, as somebody beside the process does, and log it."""
        assert isinstance(self.inner, MemoryBackend)
        with self.order:
            self.inner.link(source, path)
            self._done("link", path, other=source)

    def lock(self, path: str, *, shared: bool = False, create: bool = False) -> Lock:
        """Lock; logs the file if that makes one."""
        with self.order:
            missing = create and self.stat(path) is None
            lock = super().lock(path, shared=shared, create=create)
            if missing:
                self._done("create", path)
            return lock

    def changed(self, kind: Literal["write", "sync"], file: _CrashFile, **what: Any) -> None:
        """Log what was done to a file; called with `order` held."""
        self.log.append(Operation(kind, file.node, file.path, **what))

    def _node(self, path: str) -> int:
        found = self.inner.stat(path)
        if found is None:
            raise FileNotFoundError(path)
        return found.inode

    def _done(self, kind: Kind, path: str, **what: Any) -> None:
        self.log.append(Operation(kind, self._node(path), path, **what))


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
