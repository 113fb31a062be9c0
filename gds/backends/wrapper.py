"""Backend that forwards all calls to another one: base of fault injectors, throttles, traces.

A subclass overrides the methods that should differ. Transfers pass through `WrapperFile`; a
subclass that changes them overrides `WrapperBackend.wrap_file` to return its own kind of file.
"""

from __future__ import annotations

from gds.backends.closing import Closing
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


class WrapperFile(Closing):
    """A file that forwards all calls to `inner`; see `gds.File` for the contract of each method."""

    def __init__(self, inner: File) -> None:
        """Wrap `inner`."""
        self.inner = inner

    @property
    def path(self) -> str:
        """Path of the inner file, used in messages."""
        return self.inner.path

    @path.setter
    def path(self, path: str) -> None:
        """Set the path of the inner file."""
        self.inner.path = path

    @property
    def size_bytes(self) -> int:
        """Size at opening, in bytes."""
        return self.inner.size_bytes

    @property
    def inode(self) -> int:
        """Number of the inner file."""
        return self.inner.inode

    @property
    def alignment(self) -> int:
        """Alignment of the fast path, in bytes."""
        return self.inner.alignment

    @property
    def direct(self) -> bool:
        """Whether aligned requests bypass the page cache."""
        return self.inner.direct

    def read(self, into: Buffer, offset: int) -> IOFuture:
        """Forward to the inner file."""
        return self.inner.read(into, offset)

    def read_again(self, into: Buffer, offset: int, *, direct: bool) -> IOFuture:
        """Forward to the inner file."""
        return self.inner.read_again(into, offset, direct=direct)

    def write(self, source: Buffer, offset: int) -> IOFuture:
        """Forward to the inner file."""
        return self.inner.write(source, offset)

    def read_bytes(self, offset: int, nbytes: int) -> bytes:
        """Forward to the inner file."""
        return self.inner.read_bytes(offset, nbytes)

    def write_bytes(self, data: bytes, offset: int) -> None:
        """Forward to the inner file."""
        self.inner.write_bytes(data, offset)

    def clone(self, source: File, offset: int, nbytes: int) -> bool:
        """Forward to the inner file; if `source` is a wrapper, pass on its inner file."""
        inner = source.inner if isinstance(source, WrapperFile) else source
        return self.inner.clone(inner, offset, nbytes)

    def sync(self) -> None:
        """Forward to the inner file."""
        self.inner.sync()

    def close(self) -> None:
        """Forward to the inner file."""
        self.inner.close()


class WrapperBackend(Closing):
    """A backend that forwards all calls to `inner`, and wraps the files with `wrap_file`.

    See `gds.Backend` for the contract of each method.
    """

    def __init__(self, inner: Backend) -> None:
        """Wrap `inner`."""
        self.inner = inner

    def wrap_file(self, file: File) -> File:
        """Return the wrapper of a file that `create` or `open` returns; subclasses override it."""
        return WrapperFile(file)

    @property
    def name(self) -> str:
        """Name of the inner backend."""
        return self.inner.name

    def capabilities(self, directory: str) -> Capabilities:
        """Forward to the inner backend."""
        return self.inner.capabilities(directory)

    def allocate(self, nbytes: int, kind: BufferKind | None = None) -> Buffer:
        """Forward to the inner backend."""
        return self.inner.allocate(nbytes, kind)

    def create(self, path: str, size_bytes: int) -> File:
        """Forward to the inner backend, and wrap the file."""
        return self.wrap_file(self.inner.create(path, size_bytes))

    def open(self, path: str, *, writable: bool = False) -> File:
        """Forward to the inner backend, and wrap the file."""
        return self.wrap_file(self.inner.open(path, writable=writable))

    def stat(self, path: str) -> Stat | None:
        """Forward to the inner backend."""
        return self.inner.stat(path)

    def list_dir(self, path: str) -> list[str]:
        """Forward to the inner backend."""
        return self.inner.list_dir(path)

    def make_dir(self, path: str) -> None:
        """Forward to the inner backend."""
        self.inner.make_dir(path)

    def rename(self, source: str, target: str) -> None:
        """Forward to the inner backend."""
        self.inner.rename(source, target)

    def exchange(self, a: str, b: str) -> None:
        """Forward to the inner backend."""
        self.inner.exchange(a, b)

    def remove(self, path: str) -> None:
        """Forward to the inner backend."""
        self.inner.remove(path)

    def remove_dir(self, path: str) -> None:
        """Forward to the inner backend."""
        self.inner.remove_dir(path)

    def sync_dir(self, path: str) -> None:
        """Forward to the inner backend."""
        self.inner.sync_dir(path)

    def lock(self, path: str, *, shared: bool = False, create: bool = False) -> Lock:
        """Forward to the inner backend."""
        return self.inner.lock(path, shared=shared, create=create)

    def free_bytes(self, directory: str) -> int:
        """Forward to the inner backend."""
        return self.inner.free_bytes(directory)

    def counters(self) -> Counters:
        """Forward to the inner backend."""
        return self.inner.counters()

    def close(self) -> None:
        """Forward to the inner backend."""
        self.inner.close()
