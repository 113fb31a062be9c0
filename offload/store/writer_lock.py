"""Locks that keep a second writer out of a store: on each directory and the LOCK file in it.

A user can remove the file ``LOCK``. A process that then creates it again can lock the new file,
although the old file is still locked. The lock on the directory itself prevents this, and survives
a rename of the directory. ``LOCK`` is locked as well, because earlier versions lock nothing else.

``LOCK`` says which process has locked it, for the message that another process gets. Only the locks
decide: what a dead process has left there is recognized where that is possible, and is never relied
on.

Neither lock helps if the directory is moved away and a new one is made at its path. Therefore,
before each commit and each withdrawal, the writer checks that its paths still name the directories
that it has locked.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import stat as stat_module
import threading
import warnings
import weakref
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from gds import Backend, LockHeldError, StorageError
from gds.contract import Lock
from offload.errors import StoreError, StoreLockedError
from offload.format.names import LOCK_NAME

_HOLDER = re.compile(
    r"process ([0-9]{1,10}) on host ([A-Za-z0-9._-]{1,255}) since ([0-9T:+-]{1,40})\n"
    r"boot ([0-9a-f-]{1,40}), namespace ([0-9]{1,20}), started at ([0-9]{1,20})\n"
)
"""Content of ``LOCK``. The second line tells a process from a later one that has its number."""

_MAX_HOLDER_BYTES = 512


@dataclass(slots=True)
class _Held:
    """The locks on one directory of a store."""

    backend: Backend
    directory: str
    of_directory: Lock
    of_file: Lock


_of_this_process: weakref.WeakSet[WriterLock] = weakref.WeakSet()


def is_held_here(directory: str) -> bool:
    """Return whether this process itself holds the locks on a directory, as far as it knows."""
    path = os.path.realpath(directory)
    return any(
        os.path.realpath(held.directory) == path
        for lock in list(_of_this_process)
        if lock._pid == os.getpid()  # a forked child has copies of its parent's objects
        for held in list(lock._held)
    )


def who_holds(backend: Backend, directory: str) -> str | None:
    """Return which process has locked a directory, in words, as far as its ``LOCK`` says.

    The result is None if that is not known, or if the process that ``LOCK`` names has ended.
    """
    with suppress(OSError, StorageError, ValueError):
        with backend.open(f"{directory}/{LOCK_NAME}") as file:
            if file.size_bytes > _MAX_HOLDER_BYTES:
                return None
            text = file.read_bytes(0, file.size_bytes).decode("ascii")
        found = _HOLDER.fullmatch(text)
        if found is None:
            return None
        pid, host, since, boot, namespace, started = found.groups()
        here = _holder_here()
        if boot == here[3] and namespace == here[4]:
            if _started(int(pid)) != started:
                return None
            where = f"on host {host}"
        elif boot == here[3]:
            where = f"in another container on host {host}"
        elif host == here[1]:
            return None  # the machine has been started again since
        else:
            where = f"on host {host}"
        return f"process {pid} {where}, since {since}"
    return None


def _holder_here() -> tuple[str, ...]:
    """Return what `_HOLDER` has about this process."""
    pid, boot, namespace, started = os.getpid(), "0", "0", "0"
    with suppress(OSError, IndexError):
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        namespace = str(os.stat("/proc/self/ns/pid").st_ino)
        started = _started(pid)
    host = re.sub(r"[^A-Za-z0-9._-]", "_", socket.gethostname()) or "localhost"
    since = datetime.now(UTC).isoformat(timespec="seconds")
    return str(pid), host, since, boot, namespace, started


def _holder_text() -> str:
    pid, host, since, boot, namespace, started = _holder_here()
    return (
        f"process {pid} on host {host} since {since}\n"
        f"boot {boot}, namespace {namespace}, started at {started}\n"
    )


def _started(pid: int) -> str:
    """Return the time at which a process of this namespace began, in ticks; empty if it is gone."""
    with suppress(OSError, IndexError), open(f"/proc/{pid}/stat", encoding="latin-1") as file:
        return file.read().rpartition(")")[2].split()[19]
    return ""


def _write_holder(held: _Held, text: str) -> None:
    """Write what ``LOCK`` says. Errors are ignored, because nothing depends on it."""
    with suppress(OSError, StorageError):
        path = f"{held.directory}/{LOCK_NAME}"
        fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found, known = os.fstat(fd), held.backend.stat(path)
            is_file = stat_module.S_ISREG(found.st_mode)
            if known is not None and is_file and found.st_ino == known.inode:
                os.ftruncate(fd, 0)  # first, so that nothing is left of a longer text
                os.pwrite(fd, text.encode("ascii"), 0)
        finally:
            os.close(fd)


class WriterLock:
    """Exclusive right to write to the directories of a store. Thread-safe."""

    def __init__(self) -> None:
        self._held: list[_Held] = []
        self._pid = os.getpid()
        self._guard = threading.Lock()
        self._lost: StoreLockedError | None = None
        self._replaced: list[str] = []
        """Paths of LOCK files that had been removed and have been created again."""
        self._told = False
        _of_this_process.add(self)

    def take(self, backend: Backend, directory: str) -> None:
        """Lock one more directory, which must exist."""
        # The final "/." resolves the path if the store's path is a symbolic link.
        of_directory = backend.lock(f"{directory}/.")
        try:
            of_file = backend.lock(f"{directory}/{LOCK_NAME}", create=True)
        except BaseException:
            of_directory.release()
            raise
        held = _Held(backend, directory, of_directory, of_file)
        self._held.append(held)
        _write_holder(held, _holder_text())

    def require(self) -> None:
        """Check that no other process can have written since the locks were taken, or can now.

        A missing ``LOCK`` is created and locked again. The lock on the directory has kept other
        writers out meanwhile.

        Raises:
            StoreLockedError: Another process has locked a directory, or may have. This process must
                write nothing more; every later call raises the same error.
            StoreError: A path of the store names another directory, or nothing, at this moment.
            gds.StorageError: The locks cannot be examined at this moment.
        """
        with self._guard:
            if self._lost is not None:
                raise self._lost
            for held in self._held:
                if not held.of_directory.is_current():
                    raise StoreError(
                        errno.ESTALE,
                        "this is not the directory that was opened: that one was moved, removed, "
                        "or hidden by a mount. Nothing is committed or withdrawn until it is "
                        "back; or start a new process with its present path",
                        held.directory,
                    )
                if not held.of_file.is_current():
                    self._renew(held)

    def is_held(self) -> bool:
        """Return whether `require` raises no error."""
        try:
            self.require()
        except (StorageError, StoreError):
            return False
        return True

    def warn_once(self) -> None:
        """Warn once that a LOCK file had been removed; call this on the thread of a user's call."""
        if self._replaced and not self._told:
            self._told = True
            warnings.warn(
                f"{self._replaced[0]}: was removed, and has been made and locked again. It keeps "
                "other processes out while this one trains; a process that has ended leaves no "
                "lock behind, so the file never needs to be removed",
                RuntimeWarning,
                stacklevel=3,
            )

    def release(self) -> None:
        """Release all locks, so that other processes may write. Idempotent."""
        held, self._held = self._held, []
        for one in held:
            with suppress(StorageError):
                if self._pid == os.getpid() and one.of_file.is_current():
                    _write_holder(one, "")
            one.of_file.release()
            one.of_directory.release()

    def _renew(self, held: _Held) -> None:
        path = f"{held.directory}/{LOCK_NAME}"
        if held.backend.stat(path) is not None:
            self._lose(path)
        try:
            again = held.backend.lock(path, create=True)
        except LockHeldError:
            self._lose(path)
        held.of_file.release()
        held.of_file = again
        _write_holder(held, _holder_text())
        self._replaced.append(path)

    def _lose(self, path: str) -> None:
        self._lost = StoreLockedError(
            errno.EWOULDBLOCK,
            "this is not the file that was locked: it was removed, and another process may have "
            "created and locked a new one, and written to the store. This process commits and "
            "withdraws nothing more. Make sure that only one process trains in the store, and "
            "start it again",
            path,
        )
        raise self._lost
