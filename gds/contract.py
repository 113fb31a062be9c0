"""The contract of a storage backend: what moves bytes between files and buffers.

Everything above this layer (the optimizer, the store of checkpoints, the benchmarks) is written
against these protocols, so that a fault injector, a throttle, a recorder of crashes or another
transport is a wrapper or a sibling, never a flag. `gds.testing.BackendContract` is the
executable form of this page: a new backend subclasses it and passes.

Durability, stated once. `File.write` has reached the device or its cache when its future
resolves, nothing more. `File.sync` makes the written data (and the file's size) of that file
durable. Names (creation, `rename`, `exchange`, `remove`) are durable after `sync_dir` of the
directory that holds them. Nothing here retries a failed sync.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Protocol, Self, runtime_checkable

ALIGNMENT = 4096
"""Bytes. Every layout aligns to this: what 4Kn disks, cuFile and KvikIO all accept."""

CLONE_REACH_BYTES = 16 << 20
"""Bytes. How far from a cloned range an overwrite may need new space; see `File.clone`."""

BufferKind = Literal["host", "pinned", "device"]


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
        """Address of the first byte, in the address space that `kind` names."""
        ...

    @property
    def kind(self) -> BufferKind:
        """Where the memory is: pageable host, page-locked host, or device."""
        ...

    def slice(self, start: int, nbytes: int) -> Buffer:
        """Return the `nbytes` bytes from `start`, sharing this memory."""
        ...

    def memoryview(self) -> memoryview:
        """Return a writable byte view; raises `TypeError` where `kind` is ``"device"``."""
        ...


class IOFuture(Protocol):
    """The result of an asynchronous transfer.

    It owns the buffer and the file until it has resolved: dropping it is safe and does not
    cancel the transfer. `result` may be called any number of times.
    """

    def done(self) -> bool:
        """Return whether the transfer has ended, well or badly."""
        ...

    def result(self, timeout: float | None = None) -> int:
        """Wait for the transfer and return its length in bytes, always the whole request.

        Args:
            timeout: Seconds to wait; None waits for ever.

        Raises:
            StorageError: The transfer failed; names path and offset.
            TimeoutError: It is still running after `timeout` seconds.
        """
        ...

    def add_done_callback(self, fn: Callable[[Any], object], /) -> None:
        """Call ``fn(self)`` once resolved: on the transfer's thread, or at once if it has been.

        The callback must be short, must not block and must not raise.
        """
        ...


@runtime_checkable
class File(Protocol):
    """An open file of fixed size."""

    path: str
    """Used in messages only. Assign to it after a rename; the file itself is unaffected."""

    @property
    def size_bytes(self) -> int:
        """Size at opening; no operation here changes it."""
        ...

    @property
    def inode(self) -> int:
        """What `Stat.inode` is of a name of this file; also once it is closed.

        A name whose `Stat.inode` is another one refers to another file: this one was replaced
        there, moved or removed, and what is written to it does not show under that name.
        """
        ...

    @property
    def alignment(self) -> int:
        """Bytes; 1 where no transfer is direct.

        Requests whose offset, length and memory address are multiples of it (but for the end of
        the file) take the fast path; all others are correct, only slower.
        """
        ...

    @property
    def direct(self) -> bool:
        """Whether aligned requests bypass the page cache."""
        ...

    def read(self, into: Buffer, offset: int) -> IOFuture:
        """Start reading `into.nbytes` bytes from `offset` (bytes)."""
        ...

    def read_again(self, into: Buffer, offset: int, *, direct: bool) -> IOFuture:
        """Start reading a range anew from the device, because what came before is doubted.

        What the page cache holds of the range is dropped first, as far as the kernel lets go of
        it. So the bytes do not come from the memory that a first read may have left them in.

        Args:
            into: As for `read`. Use other memory than the first read did.
            offset: As for `read`.
            direct: Bypass the page cache, where the file takes that; else go through it. Choose
                what the first read did not: ``not file.direct`` after `read`, True after
                `read_bytes`.
        """
        ...

    def write(self, source: Buffer, offset: int) -> IOFuture:
        """Start writing all of `source` at `offset` (bytes); it must end within the file."""
        ...

    def read_bytes(self, offset: int, nbytes: int) -> bytes:
        """Read a small range through the page cache, now."""
        ...

    def write_bytes(self, data: bytes, offset: int) -> None:
        """Write a small range through the page cache, now; it must end within the file."""
        ...

    def clone(self, source: File, offset: int, nbytes: int) -> bool:
        """Take a range of another file over without moving a byte of it, where that is possible.

        Afterwards both files have the same bytes in the range, and share the space that they
        take. It counts as a write: `sync` makes it durable. What is written to either file later
        does not show in the other, and takes new space where space is shared: in the range, and,
        on some file systems, up to `CLONE_REACH_BYTES` before and behind it.

        Args:
            source: A file of the same backend. What was written to it need not have been synced.
            offset: Where the range begins in both files, in bytes.
            nbytes: Its length.

        Returns:
            False if this backend, this file system or these two files cannot do that; nothing has
            changed then. Only ranges whose ends are multiples of `ALIGNMENT` can be cloned.

        Raises:
            ValueError: `offset` is negative.
            StorageError: This file is not writable (EBADF), the range leaves it (EFBIG), or the
                file system failed; what the range holds then is not known.
        """
        ...

    def sync(self) -> None:
        """Make everything written to this file durable, and its size. Never retried."""
        ...

    def close(self) -> None:
        """Wait for transfers in flight, then release the file. Idempotent."""
        ...

    def __enter__(self) -> Self:
        """Return this file; a ``with`` block closes it at its end, also after an error."""
        ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None:
        """Close this file."""
        ...


class Lock(Protocol):
    """A held advisory lock. The kernel drops it when the process dies; a fork does not keep it."""

    def is_current(self) -> bool:
        """Return whether the path that was locked still names what is locked.

        It does not if the name was removed, or now refers to something else: then whoever locks
        that path does not meet this lock. Nor is a lock current that has been released.

        Raises `StorageError` where it cannot be told.
        """
        ...

    def release(self) -> None:
        """Release the lock. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do in one directory."""

    backend: str
    """Name of the backend, as people see it: ``posix``, ``memory``, ``kvikio``."""

    filesystem: str
    """Type of the file system: ``ext4``, ``xfs``, ``tmpfs``, ...; ``unknown`` if not readable."""

    direct: bool
    """Whether aligned transfers bypass the page cache here."""

    alignment: int
    """Bytes: the alignment the kernel asks of direct transfers here, at most `ALIGNMENT`."""

    volatile: bool
    """Whether what is written here is lost at power-off (tmpfs, ramfs, process memory)."""

    remote: bool
    """Whether another machine, or a program, serves the files (NFS, SMB, FUSE, ...). What a lock
    keeps out, and what a sync has made durable, is then decided there."""

    device_memory: bool
    """Whether buffers of kind ``device`` are accepted."""

    reason: str
    """Why `direct` is False, for people; empty where it is True."""

    clones: bool = False
    """Whether files here can share space; see `File.clone`."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Totals since the backend was made; all monotonic. Transfers only: no headers, no names."""

    bytes_read: int = 0
    """Bytes that finished reads delivered."""

    bytes_written: int = 0
    """Bytes that finished writes took."""

    num_reads: int = 0
    num_writes: int = 0

    num_syncs: int = 0
    """Calls of `File.sync` that succeeded; directories are not counted."""

    read_s: float = 0.0
    """Seconds during which at least one read was in progress."""

    write_s: float = 0.0
    """Seconds during which at least one write was in progress."""


@dataclass(frozen=True, slots=True)
class Stat:
    """What a name refers to; symbolic links are not followed."""

    kind: Literal["file", "directory", "other"]
    size_bytes: int
    inode: int
    """Changes when a name comes to refer to something else."""

    num_links: int
    """Names that a file has. If there are several (hard links), writing to the file changes what
    all of them show. 1 for what is not a file."""


@runtime_checkable
class Backend(Protocol):
    """A transport between buffers and files, and the names those files live under.

    All paths are strings. All methods but `File.read` and `File.write` are synchronous.
    Methods may be called from several threads.
    """

    @property
    def name(self) -> str:
        """Short name for messages and results."""
        ...

    def capabilities(self, directory: str) -> Capabilities:
        """Say what can be done in an existing directory. May create and remove a probe file."""
        ...

    def allocate(self, nbytes: int, kind: BufferKind | None = None) -> Buffer:
        """Return zeroed memory aligned to at least `ALIGNMENT`, registered once if that matters.

        Args:
            nbytes: Length in bytes.
            kind: Where it is to be; None for what this backend moves best.

        Raises:
            RefusedError: This backend has no memory of that kind.
            MemoryError: There is none left.
        """
        ...

    def create(self, path: str, size_bytes: int) -> File:
        """Create a file, reserve all its space, and open it for reading and writing.

        Raises `StorageError` (EEXIST, ENOSPC, ...); a file whose space could not be reserved is
        removed again.
        """
        ...

    def open(self, path: str, *, writable: bool = False) -> File:
        """Open an existing regular file; a symbolic link is refused (ELOOP)."""
        ...

    def stat(self, path: str) -> Stat | None:
        """Say what `path` is, or None if there is nothing."""
        ...

    def list_dir(self, path: str) -> list[str]:
        """Return the names in a directory, sorted."""
        ...

    def make_dir(self, path: str) -> None:
        """Create one directory; EEXIST if the name is taken, ENOENT without a parent."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Rename atomically. A file replaces a file; a directory never replaces anything."""
        ...

    def exchange(self, a: str, b: str) -> None:
        """Swap what two existing names refer to, atomically; EINVAL or ENOSYS if unsupported."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file."""
        ...

    def remove_dir(self, path: str) -> None:
        """Remove an empty directory."""
        ...

    def sync_dir(self, path: str) -> None:
        """Make the names in a directory durable. Never retried."""
        ...

    def lock(self, path: str, *, shared: bool = False, create: bool = False) -> Lock:
        """Lock a file or a directory without waiting.

        Args:
            path: What to lock. Directories can be locked, and stay locked through a rename.
            shared: Many shared locks may be held at once; an exclusive one excludes all.
            create: Create an empty file there first if there is nothing.

        Raises:
            LockHeldError: A conflicting lock is held, by any process or by this one.
        """
        ...

    def free_bytes(self, directory: str) -> int:
        """Return the bytes that an unprivileged user could still allocate there."""
        ...

    def counters(self) -> Counters:
        """Return the totals so far."""
        ...

    def close(self) -> None:
        """Wait for transfers in flight, then release threads, files and locks. Idempotent."""
        ...

    def __enter__(self) -> Self:
        """Return this backend; a ``with`` block closes it at its end, also after an error."""
        ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None:
        """Close this backend."""
        ...
