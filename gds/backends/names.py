"""Names, locks and directories of a POSIX file system: the part of a backend without transfers.

A backend for real files derives from `PosixNames` and adds `create`, `open` and the transfers.
"""
# ruff: noqa: D102 - the protocols of `gds.contract` document the methods

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat as stat_module
import struct
import time
import weakref
from collections.abc import Iterator
from typing import Final, Literal

from gds import libc
from gds.contract import Backend, Stat
from gds.errors import LockHeldError, StorageError

_LOCK_ATTEMPTS: Final = 100

# File systems take their times from a clock that the kernel advances every 1 to 10 ms. Some, such
# as ext4 with small inodes, keep whole seconds only.
_TICK_NS: Final = 100_000_000
_WHOLE_SECONDS_NS: Final = 2_100_000_000

# From linux/fs.h. The numbers are defined with a long as the argument; the kernel reads an int.
_GET_FLAGS: Final = 0x80086601
_SET_FLAGS: Final = 0x40086602
_NO_COPY_ON_WRITE: Final = 0x00800000


@contextlib.contextmanager
def reporting(what: str, path: str, offset: int | None = None) -> Iterator[None]:
    """Turn every `OSError` of the body, the operation `what` on `path`, into a `StorageError`."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(error.errno or errno.EIO, what, path, offset=offset) from error


class PosixNames(Backend):
    """Operations on names, and locks. An object belongs to the process that made it."""

    name: str = "posix"

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._closed = False
        self._held: set[FileLock] = set()

    def check_usable(self, what: str, path: str) -> None:
        """Raise `StorageError` (EBADF) if the backend is closed, or in a forked child."""
        if self._closed:
            raise StorageError(errno.EBADF, f"{what}: this backend is closed", path)
        if self.forked():
            # Threads and lock holders exist only in the parent: a wait for them would not end.
            raise StorageError(
                errno.EBADF,
                f"{what}: this backend belongs to process {self._pid}; make a new one after a fork",
                path,
            )

    def forked(self) -> bool:
        """Return whether this process is a forked child of the one that made the backend."""
        return self._pid != os.getpid()

    def stat(self, path: str) -> Stat | None:
        self.check_usable("stat", path)
        try:  # not `reporting`, which takes longer than the call: stores ask for hundreds of paths
            found = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise StorageError(error.errno or errno.EIO, "stat", path) from error
        kind: Literal["file", "directory", "other"] = "other"
        if stat_module.S_ISREG(found.st_mode):
            kind = "file"
        elif stat_module.S_ISDIR(found.st_mode):
            kind = "directory"
        num_links = found.st_nlink if kind == "file" else 1
        return Stat(kind, found.st_size, found.st_ino, num_links, _settled_ns(found.st_ctime_ns))

    def list_dir(self, path: str) -> list[str]:
        self.check_usable("list", path)
        with reporting("list", path):
            return sorted(os.listdir(path))

    def make_dir(self, path: str) -> None:
        self.check_usable("make directory", path)
        with reporting("make directory", path):
            os.mkdir(path)

    def rename(self, source: str, target: str) -> None:
        self.check_usable("rename", source)
        with reporting(f"rename to {target!r}", source):
            if not stat_module.S_ISDIR(os.lstat(source).st_mode):
                os.rename(source, target)
                return
            try:
                # A plain rename would replace an empty directory.
                libc.rename_with(source, target, libc.RENAME_NOREPLACE)
            except OSError as error:
                # EINVAL may also mean that the directory is moved into itself: then the plain
                # rename fails with EINVAL as well.
                if error.errno not in (errno.EINVAL, errno.ENOSYS):
                    raise
                if os.path.lexists(target):
                    raise FileExistsError(errno.EEXIST, "", target) from None
                os.rename(source, target)

    def exchange(self, a: str, b: str) -> None:
        self.check_usable("exchange", a)
        with reporting(f"exchange with {b!r}", a):
            libc.rename_with(a, b, libc.RENAME_EXCHANGE)

    def remove(self, path: str) -> None:
        self.check_usable("remove", path)
        with reporting("remove", path):
            os.unlink(path)

    def remove_dir(self, path: str) -> None:
        self.check_usable("remove directory", path)
        with reporting("remove directory", path):
            os.rmdir(path)

    def sync_dir(self, path: str) -> None:
        self.check_usable("sync directory", path)
        with reporting("sync directory", path):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def lock(self, path: str, *, shared: bool = False, create: bool = False) -> FileLock:
        self.check_usable("lock", path)
        with reporting("lock", path):
            for _ in range(_LOCK_ATTEMPTS):
                fd = _open_to_lock(path, create)
                try:
                    _flock(fd, path, shared)
                    current = _same_file(fd, path)
                except BaseException:
                    os.close(fd)
                    raise
                if current:
                    held = FileLock(fd, path, self._held)
                    self._held.add(held)
                    return held
                # The path was renamed or removed between open and lock: another object is locked.
                os.close(fd)
        raise StorageError(errno.EBUSY, "lock: another process keeps replacing this path", path)

    def free_bytes(self, directory: str) -> int:
        self.check_usable("free space", directory)
        with reporting("free space", directory):
            found = os.statvfs(directory)
            return found.f_bavail * found.f_frsize


class FileLock:
    """A held `flock`. A forked child closes its copy at once, so that it cannot keep the lock."""

    def __init__(self, fd: int, path: str, held: set[FileLock]) -> None:
        self.path = path
        self._fd = fd
        self._pid = os.getpid()
        self._held = held
        _locks.add(self)

    def is_current(self) -> bool:
        with reporting("check the lock", self.path):
            return self._fd >= 0 and _same_file(self._fd, self.path)

    def release(self) -> None:
        fd, self._fd = self._fd, -1
        self._held.discard(self)
        if fd < 0:
            return
        with reporting("unlock", self.path):
            try:
                # Closing is not enough if a process that C code forked has inherited the
                # descriptor. A forked child shares the lock, so it must never unlock.
                if self._pid == os.getpid():
                    fcntl.flock(fd, fcntl.LOCK_UN)
            finally:
                os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.release()

    def __repr__(self) -> str:
        return f"FileLock({self.path!r}, {'held' if self._fd >= 0 else 'released'})"


_locks: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _release_in_child() -> None:
    """Close all locks' descriptors in a forked child; the parent keeps the locks."""
    for held in list(_locks):
        held.release()


os.register_at_fork(after_in_child=_release_in_child)


def overwrite_in_place(fd: int) -> bool:
    """Make a copy-on-write file system (btrfs) overwrite a file in place; the file must be empty.

    Otherwise an overwrite would take new space, and could fail on a full disk although the file's
    space was reserved. File systems that do not know the flag overwrite in place anyway.
    """
    with contextlib.suppress(OSError):
        flags = bytearray(8)
        fcntl.ioctl(fd, _GET_FLAGS, flags)
        (present,) = struct.unpack_from("=i", flags)
        fcntl.ioctl(fd, _SET_FLAGS, struct.pack("=q", present | _NO_COPY_ON_WRITE))
        return True
    return False


def _settled_ns(changed_ns: int) -> int:
    """Return the time of a change; 0 if it is too recent to be told from that of a later change."""
    tick_ns = _TICK_NS if changed_ns % 1_000_000_000 else _WHOLE_SECONDS_NS
    return changed_ns if time.time_ns() - changed_ns > tick_ns else 0


def _open_to_lock(path: str, create: bool) -> int:
    """Return a descriptor of a file or directory to lock; with `create`, a missing file is made."""
    # O_NONBLOCK: opening a pipe must not wait for its other end.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    try:
        fd = os.open(path, flags)
    except FileNotFoundError:
        if not create:
            raise
        fd = os.open(path, flags | os.O_CREAT, 0o666)
    mode = os.fstat(fd).st_mode
    if not (stat_module.S_ISREG(mode) or stat_module.S_ISDIR(mode)):
        os.close(fd)
        raise StorageError(errno.EINVAL, "lock: neither a file nor a directory", path)
    return fd


def _flock(fd: int, path: str, shared: bool) -> None:
    operation = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        # Never use lockf: closing any descriptor of the file would drop the lock.
        fcntl.flock(fd, operation | fcntl.LOCK_NB)
    except BlockingIOError as error:
        kind = "a shared" if shared else "an exclusive"
        raise LockHeldError(
            error.errno or errno.EWOULDBLOCK,
            f"take {kind} lock: another process, or another handle in this one, holds it",
            path,
        ) from error


def _same_file(fd: int, path: str) -> bool:
    """Return whether `path` names the file of a descriptor; symbolic links are not followed."""
    try:
        named = os.stat(path, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return os.path.samestat(os.fstat(fd), named)
