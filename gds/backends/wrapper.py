"""Backend that forwards all calls to another one: base of fault injectors, throttles, traces.

A subclass overrides the methods that should differ. Transfers pass through `WrapperFile`; a
subclass that changes them overrides `WrapperBackend.wrap_file` to return its own kind of file.
"""
# ruff: noqa: D102 - the protocols of `gds.contract` document the methods

from __future__ import annotations

from gds.contract import (
    Backend,
    Buffer,
    BufferKind,
    Capabilities,
    Counters,
    File,
    IOFuture,
    Lock,
    Stat,
)


class WrapperFile(File):
    """A file that forwards all calls to `inner`."""

    def __init__(self, inner: File) -> None:
        self.inner = inner

    @property
    def path(self) -> str:
        return self.inner.path

    @path.setter
    def path(self, path: str) -> None:
        self.inner.path = path

    @property
    def size_bytes(self) -> int:
        return self.inner.size_bytes

    @property
    def inode(self) -> int:
        return self.inner.inode

    @property
    def alignment(self) -> int:
        return self.inner.alignment

    @property
    def direct(self) -> bool:
        return self.inner.direct

    def read(self, into: Buffer, offset: int) -> IOFuture:
        return self.inner.read(into, offset)

    def read_again(self, into: Buffer, offset: int, *, direct: bool) -> IOFuture:
        return self.inner.read_again(into, offset, direct=direct)

    def write(self, source: Buffer, offset: int) -> IOFuture:
        return self.inner.write(source, offset)

    def read_bytes(self, offset: int, nbytes: int) -> bytes:
        return self.inner.read_bytes(offset, nbytes)

    def write_bytes(self, data: bytes, offset: int) -> None:
        self.inner.write_bytes(data, offset)

    def clone(self, source: File, offset: int, nbytes: int) -> bool:
        inner = source.inner if isinstance(source, WrapperFile) else source
        return self.inner.clone(inner, offset, nbytes)

    def sync(self) -> None:
        self.inner.sync()

    def close(self) -> None:
        self.inner.close()


class WrapperBackend(Backend):
    """A backend that forwards all calls to `inner`, and wraps the files with `wrap_file`."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner

    def wrap_file(self, file: File) -> File:
        """Return the wrapper of a file that `create` or `open` returns; subclasses override it."""
        return WrapperFile(file)

    @property
    def name(self) -> str:
        return self.inner.name

    def capabilities(self, directory: str) -> Capabilities:
        return self.inner.capabilities(directory)

    def allocate(self, nbytes: int, kind: BufferKind | None = None) -> Buffer:
        return self.inner.allocate(nbytes, kind)

    def create(self, path: str, size_bytes: int) -> File:
        return self.wrap_file(self.inner.create(path, size_bytes))

    def open(self, path: str, *, writable: bool = False) -> File:
        return self.wrap_file(self.inner.open(path, writable=writable))

    def stat(self, path: str) -> Stat | None:
        return self.inner.stat(path)

    def list_dir(self, path: str) -> list[str]:
        return self.inner.list_dir(path)

    def make_dir(self, path: str) -> None:
        self.inner.make_dir(path)

    def rename(self, source: str, target: str) -> None:
        self.inner.rename(source, target)

    def exchange(self, a: str, b: str) -> None:
        self.inner.exchange(a, b)

    def remove(self, path: str) -> None:
        self.inner.remove(path)

    def remove_dir(self, path: str) -> None:
        self.inner.remove_dir(path)

    def sync_dir(self, path: str) -> None:
        self.inner.sync_dir(path)

    def lock(self, path: str, *, shared: bool = False, create: bool = False) -> Lock:
        return self.inner.lock(path, shared=shared, create=create)

    def free_bytes(self, directory: str) -> int:
        return self.inner.free_bytes(directory)

    def counters(self) -> Counters:
        return self.inner.counters()

    def close(self) -> None:
        self.inner.close()
