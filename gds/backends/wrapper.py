"""A backend that forwards everything to another: the base of fault injectors, throttles, traces.

Override what should differ. Transfers pass through `WrapperFile`; a subclass that changes them
overrides `WrapperBackend.wrap_file` to return its own.
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
    """Forwards everything to `inner`."""

    def __init__(self, inner: File) -> None:
        self.inner = inner

    @property
    def path(self) -> str:
        """The inner file's path, used in messages."""
        return self.inner.path

    @path.setter
    def path(self, path: str) -> None:
        self.inner.path = path

    @property
    def size_bytes(self) -> int:
        """Size at opening, in bytes."""
        return self.inner.size_bytes

    @property
    def inode(self) -> int:
        """The inner file's number."""
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
        """Forward."""
        return self.inner.read(into, offset)

    def read_again(self, into: Buffer, offset: int, *, direct: bool) -> IOFuture:
        """Forward."""
        return self.inner.read_again(into, offset, direct=direct)

    def write(self, source: Buffer, offset: int) -> IOFuture:
        """Forward."""
        return self.inner.write(source, offset)

    def read_bytes(self, offset: int, nbytes: int) -> bytes:
        """Forward."""
        return self.inner.read_bytes(offset, nbytes)

    def write_bytes(self, data: bytes, offset: int) -> None:
        """Forward."""
        self.inner.write_bytes(data, offset)

    def clone(self, source: File, offset: int, nbytes: int) -> bool:
        """Forward, with what the source wraps."""
        inner = source.inner if isinstance(source, WrapperFile) else source
        return self.inner.clone(inner, offset, nbytes)

    def sync(self) -> None:
        """Forward."""
        self.inner.sync()

    def close(self) -> None:
        """Forward."""
        self.inner.close()


class WrapperBackend(Closing):
    """Forwards everything to `inner`; files come back wrapped by `wrap_file`."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner

    def wrap_file(self, file: File) -> File:
        """Wrap what `create` and `open` return; a subclass returns its own kind of file."""
        return WrapperFile(file)

    @property
    def name(self) -> str:
        """The inner backend's name."""
        return self.inner.name

    def capabilities(self, directory: str) -> Capabilities:
        """Forward."""
        return self.inner.capabilities(directory)

    def allocate(self, nbytes: int, kind: BufferKind | None = None) -> Buffer:
        """Forward."""
        return self.inner.allocate(nbytes, kind)

    def create(self, path: str, size_bytes: int) -> File:
        """Forward, and wrap the file."""
        return self.wrap_file(self.inner.create(path, size_bytes))

    def open(self, path: str, *, writable: bool = False) -> File:
        """Forward, and wrap the file."""
        return self.wrap_file(self.inner.open(path, writable=writable))

    def stat(self, path: str) -> Stat | None:
        """Forward."""
        return self.inner.stat(path)

    def list_dir(self, path: str) -> list[str]:
        """Forward."""
        return self.inner.list_dir(path)

    def make_dir(self, path: str) -> None:
        """Forward."""
        self.inner.make_dir(path)

    def rename(self, source: str, target: str) -> None:
        """Forward."""
        self.inner.rename(source, target)

    def exchange(self, a: str, b: str) -> None:
        """Forward."""
        self.inner.exchange(a, b)

    def remove(self, path: str) -> None:
        """Forward."""
        self.inner.remove(path)

    def remove_dir(self, path: str) -> None:
        """Forward."""
        self.inner.remove_dir(path)

    def sync_dir(self, path: str) -> None:
        """Forward."""
        self.inner.sync_dir(path)

    def lock(self, path: str, *, shared: bool = False, create: bool = False) -> Lock:
        """Forward."""
        return self.inner.lock(path, shared=shared, create=create)

    def free_bytes(self, directory: str) -> int:
        """Forward."""
        return self.inner.free_bytes(directory)

    def counters(self) -> Counters:
        """Forward."""
        return self.inner.counters()

    def close(self) -> None:
        """Forward."""
        self.inner.close()
