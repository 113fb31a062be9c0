"""The locks of a store at each step, and the errors of directories that cannot hold one."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from gds import Backend, LockHeldError, MemoryBackend, PosixBackend, StorageError, WrapperBackend
from gds.contract import Lock, Stat
from offload.errors import (
    StoreError,
    StoreFullError,
    StoreLockedError,
    UnreadableError,
)
from offload.format.names import LOCK_NAME
from offload.store.store_errors import NOTHING_CHANGED, as_store_errors, nearest_existing
from offload.store.writer_lock import WriterLock
from tests.crash.fault_backend import FaultBackend

RUN, OTHER = "/run", "/other"

FORKED = """
import os, sys
from gds import PosixBackend
from offload.store.writer_lock import WriterLock, is_held_here
lock = WriterLock()
lock.take(PosixBackend(), sys.argv[1])
child = os.fork()
if child == 0:
    os._exit(10 + is_held_here(sys.argv[1]))
_, status = os.waitpid(child, 0)
print(is_held_here(sys.argv[1]), os.waitstatus_to_exitcode(status))
"""


class Between(WrapperBackend):
    """A backend that calls a function once, just before the next lock is taken."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.before_lock: Callable[[], None] | None = None

    def lock(self, path: str, *, shared: bool = False, create: bool = False) -> Lock:
        """Let the other one come first."""
        before, self.before_lock = self.before_lock, None
        if before is not None:
            before()
        return super().lock(path, shared=shared, create=create)


class Held(WrapperBackend):
    """A backend in which, once it is armed, the first look at a path lasts until it may go on."""

    def __init__(self, inner: Backend, path: str) -> None:
        super().__init__(inner)
        self._path = path
        self.is_armed = False
        self.looking, self.go_on = threading.Event(), threading.Event()

    def stat(self, path: str) -> Stat | None:
        """Look, and wait if it is the first time."""
        found = super().stat(path)
        if self.is_armed and path == self._path and not self.looking.is_set():
            self.looking.set()
            assert self.go_on.wait(100)
        return found


def memory() -> MemoryBackend:
    return MemoryBackend(directories=[RUN, OTHER])


def locked(backend: Backend, *directories: str) -> WriterLock:
    """Return the locks of a writer of some directories."""
    lock = WriterLock()
    for directory in directories or (RUN,):
        lock.take(backend, directory)
    return lock


def num_descriptors(path: Path) -> int:
    """Return how many descriptors this process has for a file, also those of a removed one."""
    found = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return sum(os.readlink(one).startswith(str(path)) for one in found if os.path.lexists(one))


class TestLocks:
    """The only writer of a store."""

    def test_a_forked_child_does_not_hold_what_its_parent_holds(self, tmp_path: Path) -> None:
        done = subprocess.run(
            [sys.executable, "-c", FORKED, str(tmp_path)],
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.split() == ["True", "10"]

    def test_a_directory_whose_lock_file_cannot_be_locked_is_free_again(self) -> None:
        backend = FaultBackend(memory())
        lock = WriterLock()
        backend.fail_if(lambda kind, path: kind == "lock" and path.endswith(LOCK_NAME))
        with pytest.raises(StorageError, match="injected") as error:
            lock.take(backend, RUN)
        locked(backend).release()
        assert error.value.errno == errno.EIO

    def test_each_directory_must_be_the_one_that_was_locked(self) -> None:
        backend = memory()
        lock = locked(backend, RUN, OTHER)
        backend.rename(OTHER, "/away")
        backend.make_dir(OTHER)
        assert not lock.is_held()
        with pytest.raises(StoreError, match="not the directory that was opened") as error:
            lock.require()
        assert error.value.filename == OTHER

    def test_a_lock_that_cannot_be_examined_is_not_known_to_be_held(self) -> None:
        backend = FaultBackend(memory())
        lock = locked(backend)
        assert lock.is_held()
        backend.remove(f"{RUN}/{LOCK_NAME}")
        backend.fail("stat", 1, forever=True)
        with pytest.raises(StorageError, match="injected"):
            lock.require()
        assert not lock.is_held()
        backend.repair()
        assert lock.is_held()

    def test_two_threads_that_look_at_once_do_not_lock_each_other_out(self) -> None:
        """Each finds that LOCK is gone; one makes it again, and both go on."""
        backend = Held(memory(), f"{RUN}/{LOCK_NAME}")
        lock = locked(backend)
        backend.remove(f"{RUN}/{LOCK_NAME}")
        backend.is_armed = True
        errors: list[BaseException] = []

        def look() -> None:
            try:
                lock.require()
            except StoreError as error:
                errors.append(error)

        threads = [threading.Thread(target=look) for _ in range(2)]
        threads[0].start()
        assert backend.looking.wait(100)
        threads[1].start()
        threads[1].join(0.2)  # it may wait for the first one, or be done
        backend.go_on.set()
        for thread in threads:
            thread.join()
        assert errors == []
        assert lock.is_held()

    def test_a_lock_file_that_another_process_makes_meanwhile_ends_all_writing(self) -> None:
        inner = memory()
        backend, other = Between(inner), []
        lock = locked(backend)
        inner.remove(f"{RUN}/{LOCK_NAME}")
        backend.before_lock = lambda: other.append(inner.lock(f"{RUN}/{LOCK_NAME}", create=True))
        with pytest.raises(StoreLockedError, match="not the file that was locked"):
            lock.require()
        other[0].release()
        with pytest.raises(StoreLockedError, match="not the file that was locked"):
            lock.require()

    def test_a_lock_file_that_is_made_again_takes_no_further_descriptor(
        self, tmp_path: Path
    ) -> None:
        with PosixBackend() as backend:
            lock = locked(backend, str(tmp_path))
            before = num_descriptors(tmp_path / LOCK_NAME)
            for _ in range(3):
                (tmp_path / LOCK_NAME).unlink()
                lock.require()
            assert num_descriptors(tmp_path / LOCK_NAME) == before > 0
            with pytest.raises(LockHeldError):
                backend.lock(str(tmp_path / LOCK_NAME))
            lock.release()

    def test_a_warning_that_is_raised_as_an_error_comes_once_as_well(self) -> None:
        backend = memory()
        lock = locked(backend)
        backend.remove(f"{RUN}/{LOCK_NAME}")
        lock.require()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(RuntimeWarning, match="was removed, and has been made"):
                lock.warn_once()
            lock.warn_once()


class TestErrors:
    """Errors of the file system, as errors about a store."""

    @pytest.mark.parametrize(
        ("error", "expected", "words"),
        [
            (StorageError(errno.EACCES, "make", RUN), StoreError, "cannot keep a store here"),
            (StorageError(errno.ENOSPC, "make", RUN), StoreFullError, "bytes are free"),
            (StorageError(errno.EIO, "make", RUN), UnreadableError, NOTHING_CHANGED),
            (StorageError(errno.EMFILE, "make", RUN), UnreadableError, NOTHING_CHANGED),
            (UnreadableError(errno.EIO, "not known", RUN), UnreadableError, NOTHING_CHANGED),
            (UnreadableError(errno.EACCES, "not known", RUN), UnreadableError, NOTHING_CHANGED),
            (UnreadableError(errno.ENOSPC, "not known", RUN), UnreadableError, NOTHING_CHANGED),
        ],
        ids=[
            "permission", "space", "drive", "descriptors",
            "unreadable", "unreadable-permission", "unreadable-space",
        ],
    )  # fmt: skip
    def test_only_one_that_shows_it_says_that_the_directory_is_unsuitable(
        self, error: StorageError, expected: type[StoreError], words: str
    ) -> None:
        with pytest.raises(StoreError) as caught, as_store_errors(memory(), RUN):
            raise error
        assert type(caught.value) is expected
        assert words in (caught.value.strerror or "")
        assert caught.value.errno == error.errno

    def test_a_file_in_the_way_is_no_directory(self) -> None:
        backend = memory()
        backend.create(f"{RUN}/a", 1).close()
        for path in (f"{RUN}/a", f"{RUN}/a/b/c"):
            with pytest.raises(StorageError) as caught:
                nearest_existing(backend, path)
            assert (caught.value.errno, caught.value.filename) == (errno.ENOTDIR, f"{RUN}/a")
