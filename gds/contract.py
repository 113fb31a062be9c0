"""Contract of a storage backend, which moves bytes between files and buffers.

Everything above this layer (the optimizer, the store of checkpoints, the benchmarks) is written
against these protocols. So a fault injector, a throttle, a recorder of crashes or another
transport is a wrapper or another backend, never a flag. The classes of this package derive from
the protocols, whose docstrings are also theirs. `gds.testing.BackendContract` is the executable
form of this module: the tests of a new backend subclass it and must pass.

Durability of all backends: when the future of `File.write` resolves, the data has only reached the
device or its cache (or the page cache, if the transfer is not direct). `File.sync` makes the
written data and the size of that file durable. Names (creation, `rename`, `exchange`,
`remove`) are durable after `sync_dir` of the directory that holds them. No backend retries a
failed sync.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Protocol, Self, runtime_checkable

ALIGNMENT = 4096
"""Alignment of every layout, in bytes. 4Kn disks, cuFile and KvikIO all accept it."""

CLONE_REACH_BYTES = 16 << 20
"""Largest distance from a cloned range, in bytes, at which an overwrite may need new space."""

BufferKind = Literal["host", "pinned", "device"]
"""Kind of a buffer's memory: pageable host, page-locked host, or device."""


@runtime_checkable
class Buffer(Protocol):
    """A contiguous range of memory that a backend can read into and write from.

    A slice keeps the memory of its parent alive. Memory handed to `File.read` or `File.write`
    belongs to the backend until the returned future has resolved.
    """

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        ...

    @property
    def address(self) -> int:
        """Address of the first byte; a device address if `kind` is ``"device"``."""
        ...

    @property
    def kind(self) -> BufferKind:
        """Kind of the memory: pageable host, page-locked host, or device."""
        ...

    def slice(self, start: int, nbytes: int) -> Buffer:
        """Return a buffer of `nbytes` bytes from `start`, which shares this memory.

        Raises:
            ValueError: The range is not within this buffer.
        """
        ...

    def memoryview(self) -> memoryview:
        """Return a writable byte view; raises `TypeError` if `kind` is ``"device"``."""
        ...


class IOFuture(Protocol):
    """The result of an asynchronous transfer.

    The transfer keeps the buffer and the file alive until it has ended: dropping the future is
    safe and does not cancel the transfer. `result` may be called any number of times.
    """

    def done(self) -> bool:
        """Return whether the transfer has ended, with success or with an error."""
        ...

    def result(self, timeout: float | None = None) -> int:
        """Wait for the transfer and return the length of the whole request, in bytes.

        Raises:
            StorageError: The transfer failed; the error names path and offset.
            TimeoutError: The transfer is still running after `timeout` seconds.
        """
        ...

    def add_done_callback(self, fn: Callable[[Any], object], /) -> None:
        """Call ``fn(self)`` when the transfer has ended.

        The call is made on the transfer's thread, or at once on the caller's thread if the
        transfer has already ended. The callback must be short, must not block and must not raise.
        """
        ...


class Closing(Protocol):
    """Something that a ``with`` block closes at its end, also after an error."""

    def close(self) -> None:
        """Release everything that it holds. Idempotent."""
        ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None:
        self.close()


@runtime_checkable
class File(Closing, Protocol):
    """An open file of fixed size."""

    path: str
    """Path used in messages only. Assign to it after a rename; the file itself is unaffected."""

    @property
    def size_bytes(self) -> int:
        """Size at opening, in bytes; no operation of this class changes it."""
        ...

    @property
    def inode(self) -> int:
        """Inode number of the file, equal to `Stat.inode` of its names; also valid after `close`.

        A name whose `Stat.inode` differs refers to another file: this file was replaced, moved or
        removed under that name, and later writes to this file do not show under it.
        """
        ...

    @property
    def alignment(self) -> int:
        """Alignment of the fast path, in bytes; 1 if no transfer is direct.

        Requests whose offset, length and memory address are multiples of it take the fast path,
        except for a partial block at the end of the file. All other requests are correct too, only
        slower.
        """
        ...

    @property
    def direct(self) -> bool:
        """Whether aligned requests bypass the page cache."""
        ...

    def read(self, into: Buffer, offset: int) -> IOFuture:
        """Start reading `into.nbytes` bytes from `offset` (bytes) into `into`.

        The future raises `gds.ShortReadError` if the range leaves the file.

        Raises:
            ValueError: `offset` is negative.
            StorageError: The file or its backend is closed.
        """
        ...

    def read_again(self, into: Buffer, offset: int, *, direct: bool) -> IOFuture:
        """Start a second read of a range, from the device, if the result of the first is in doubt.

        The range is first dropped from the page cache, as far as the kernel can drop it. So the
        bytes do not come from pages that the first read may have filled.

        Args:
            into: Buffer to fill. Use other memory than the first read used.
            offset: Start of the range in the file, in bytes.
            direct: Bypass the page cache, if the file supports that; otherwise go through it.
                Choose the way that the first read did not take: ``not file.direct`` after `read`,
                True after `read_bytes`.
        """
        ...

    def write(self, source: Buffer, offset: int) -> IOFuture:
        """Start writing all of `source` at `offset` (bytes); the range must end within the file.

        Raises:
            ValueError: `offset` is negative.
            StorageError: The file is open for reading only (EBADF), the range leaves the file
                (EFBIG), or the file or its backend is closed. Nothing is written then. A backend
                may raise it from the future instead.
        """
        ...

    def read_bytes(self, offset: int, nbytes: int) -> bytes:
        """Read a small range through the page cache; blocks until it is read.

        Raises `ShortReadError` if the range leaves the file.
        """
        ...

    def write_bytes(self, data: bytes, offset: int) -> None:
        """Write a small range through the page cache; blocks until it is written.

        The range must end within the file. The write is durable after `sync`.
        """
        ...

    def clone(self, source: File, offset: int, nbytes: int) -> bool:
        """Take over a range of another file without copying its bytes, if that is possible.

        Afterwards both files have the same bytes in the range and share its disk space. A clone
        is like a write: `sync` makes it durable. A later write to either file does not show in
        the other. Such a write takes new space wherever space is shared: in the range and, on some
        file systems, up to `CLONE_REACH_BYTES` before and after the range.

        Args:
            source: A file of the same backend. Data written to it need not be synced first.
            offset: Start of the range in both files, in bytes.
            nbytes: Length of the range, in bytes.

        Returns:
            Whether the range was cloned. If False, the backend, the file system or the two files
            cannot do it, and nothing has changed. Only ranges whose ends are multiples of
            `ALIGNMENT` can be cloned.

        Raises:
            ValueError: `offset` is negative.
            StorageError: This file is not writable (EBADF), the range leaves it (EFBIG), or the
                file system failed. After a failure of the file system the content of the range is
                unknown.
        """
        ...

    def sync(self) -> None:
        """Make the file's size and everything written to it durable. A failed sync is not retried.

        Raises:
            StorageError: The sync failed. Data written since the last sync may be lost.
        """
        ...

    def close(self) -> None:
        """Wait for transfers in flight, then release the file. Idempotent."""
        ...


class Lock(Protocol):
    """A held advisory lock, for any thread. It ends with its process; a forked child lacks it."""

    def is_current(self) -> bool:
        """Return whether the locked path still names the file or directory that is locked.

        The answer is False if the name was removed or refers to something else now: then another
        lock on that path does not conflict with this one. It is also False after `release`.

        Raises:
            StorageError: The system cannot examine the path.
        """
        ...

    def release(self) -> None:
        """Release the lock. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Capabilities of a backend in one directory."""

    backend: str
    """Name of the backend for people: ``posix``, ``memory``, ``kvikio``."""

    filesystem: str
    """Type of the file system: ``ext4``, ``xfs``, ``tmpfs``, ...; ``unknown`` if not readable."""

    direct: bool
    """Whether aligned transfers bypass the page cache in the directory."""

    alignment: int
    """Alignment that the kernel requires of direct transfers, in bytes; at most `ALIGNMENT`."""

    volatile: bool
    """Whether the directory's files are lost at power-off (tmpfs, ramfs, process memory)."""

    remote: bool
    """Whether another machine or a program serves the files (NFS, SMB, FUSE, ...). That machine or
    program then decides which locks conflict and what a sync makes durable."""

    device_memory: bool
    """Whether buffers of kind ``device`` are accepted."""

    reason: str
    """Reason, for people, why `direct` is False; empty if it is True."""

    clones: bool = False
    """Whether files in the directory can share space; see `File.clone`."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Totals of a backend's transfers since it was made; all of them only grow.

    `File.read`, `File.read_again` and `File.write` count if they succeed. `File.read_bytes`,
    `File.write_bytes`, clones and operations on names do not count.
    """

    bytes_read: int = 0
    bytes_written: int = 0
    num_reads: int = 0
    num_writes: int = 0
    num_syncs: int = 0
    """Number of successful calls of `File.sync`; syncs of directories do not count."""

    read_s: float = 0.0
    """Seconds during which at least one read was in progress."""

    write_s: float = 0.0
    """Seconds during which at least one write was in progress."""


@dataclass(frozen=True, slots=True)
class Stat:
    """Description of the object that a name refers to; symbolic links are not followed."""

    kind: Literal["file", "directory", "other"]
    """Kind of the object; ``other`` for links, devices, pipes and sockets."""

    size_bytes: int
    """Size of a file, in bytes; without meaning for other kinds."""

    inode: int
    """Inode number of the object. It changes if the name comes to refer to another object."""

    num_links: int
    """Number of names of a file; 1 for any other object. If a file has several names (hard links),
    a write to the file shows under all of them."""

    changed_ns: int = 0
    """Time of the last change of the object. For a directory, that is a change of the names in it.
    If two values are equal and not 0, nothing has changed in between. The value is 0 if the backend
    does not know the time, or if it is so recent that the next change may bear the same time."""


@runtime_checkable
class Backend(Closing, Protocol):
    """A transport between buffers and files, with the operations on the files' names.

    All paths are strings. All methods block until they are done, except `File.read`,
    `File.read_again` and `File.write`. Methods may be called from several threads at once.
    """

    @property
    def name(self) -> str:
        """Short name of the backend, for messages and results."""
        ...

    def capabilities(self, directory: str) -> Capabilities:
        """Return what the backend can do in an existing directory, perhaps tried with a probe file.

        Raises:
            StorageError: The directory does not exist, or its device failed.
        """
        ...

    def allocate(self, nbytes: int, kind: BufferKind | None = None) -> Buffer:
        """Return zeroed memory aligned to at least `ALIGNMENT` bytes.

        If the transport needs registered memory, it registers the buffer once, not in each
        transfer.

        Args:
            nbytes: Length in bytes.
            kind: Kind of the memory; None for the kind that the backend moves best.

        Raises:
            RefusedError: This backend has no memory of that kind.
            MemoryError: Not enough memory is left.
        """
        ...

    def create(self, path: str, size_bytes: int) -> File:
        """Create a file of zeros, reserve all its space, and open it for reading and writing.

        The name is durable after `sync_dir` of its directory.

        Raises:
            StorageError: The name is taken (EEXIST), the space is missing (ENOSPC), or another
                error occurred. If the space cannot be reserved, the file is removed again.
        """
        ...

    def open(self, path: str, *, writable: bool = False) -> File:
        """Open an existing regular file; a symbolic link is refused (ELOOP)."""
        ...

    def stat(self, path: str) -> Stat | None:
        """Return a description of the object at `path`, or None if the path does not exist."""
        ...

    def list_dir(self, path: str) -> list[str]:
        """Return the names in a directory, sorted."""
        ...

    def make_dir(self, path: str) -> None:
        """Create one directory; EEXIST if the name is taken, ENOENT if the parent is missing."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Rename atomically. A file replaces a file; a directory never replaces anything."""
        ...

    def exchange(self, a: str, b: str) -> None:
        """Swap the objects of two existing names atomically; EINVAL or ENOSYS if unsupported."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file."""
        ...

    def remove_dir(self, path: str) -> None:
        """Remove an empty directory."""
        ...

    def sync_dir(self, path: str) -> None:
        """Make the names in a directory durable. A failed sync is not retried."""
        ...

    def lock(self, path: str, *, shared: bool = False, create: bool = False) -> Lock:
        """Lock a file or a directory without waiting.

        Args:
            path: File or directory to lock. It stays locked through a rename.
            shared: Take a shared lock. Many shared locks may be held at once; an exclusive lock
                excludes all others.
            create: Create an empty file first if the path does not exist.

        Raises:
            LockHeldError: A conflicting lock is held, by another process or by this one.
        """
        ...

    def free_bytes(self, directory: str) -> int:
        """Return the free bytes of the directory's file system for an unprivileged user."""
        ...

    def counters(self) -> Counters:
        """Return the totals so far; also after `close`."""
        ...

    def close(self) -> None:
        """Wait for transfers in flight, then release threads, files and locks. Idempotent."""
        ...
