"""The posix backend's names, locks, descriptors and threads, through forks, deaths and exits."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gds import ALIGNMENT, LockHeldError, PosixBackend, StorageError, libc
from tests.contract.conftest import open_below, wait_for, wait_for_release
from tests.dying import dying

NBYTES = 16 * ALIGNMENT
ROOT = Path(__file__).parents[2]


# Names


def test_renames_work_where_the_kernel_has_no_flags_for_them(backend, directory, monkeypatch):
    monkeypatch.setattr(libc, "_libc", None)
    backend.make_dir(f"{directory}/a")
    backend.make_dir(f"{directory}/b")
    with pytest.raises(StorageError) as caught:
        backend.rename(f"{directory}/a", f"{directory}/b")
    assert caught.value.errno == errno.EEXIST
    backend.rename(f"{directory}/a", f"{directory}/c")
    assert backend.list_dir(directory) == ["b", "c"]
    with pytest.raises(StorageError) as caught:
        backend.exchange(f"{directory}/b", f"{directory}/c")
    assert caught.value.errno == errno.ENOSYS


def test_a_name_replaced_during_open_is_not_mixed_up(backend, directory, monkeypatch):
    backend.create(f"{directory}/file", NBYTES).close()
    Path(directory, "other").write_bytes(bytes(NBYTES))
    real_open = os.open

    def replace_first(path, flags, mode=0o777):
        if flags & os.O_DIRECT:
            os.replace(f"{directory}/other", f"{directory}/file")
        return real_open(path, flags, mode)

    monkeypatch.setattr(os, "open", replace_first)
    with pytest.raises(StorageError, match="replaced"):
        backend.open(f"{directory}/file")
    assert not Path(directory, "other").exists()
    assert open_below(directory) == []


# Descriptors, threads, processes


def test_no_descriptor_is_left_open_by_any_path(directory, memory_directory):
    backend = PosixBackend(direct=True)
    backend.create(f"{directory}/kept", NBYTES)
    backend.create(f"{directory}/closed", NBYTES).close()
    backend.create(f"{directory}/dropped", NBYTES)
    backend.capabilities(directory)
    backend.lock(directory)
    backend.lock(f"{directory}/LOCK", create=True).release()
    backend.sync_dir(directory)
    for operation in (
        lambda: backend.create(f"{directory}/kept", 1),
        lambda: backend.create(f"{memory_directory}/refused", 1),
        lambda: backend.open(directory),
        lambda: backend.lock(directory),
        lambda: backend.sync_dir(f"{directory}/kept"),
    ):
        with pytest.raises(StorageError):
            operation()
    file = backend.open(f"{directory}/kept", writable=True)
    file.write(backend.allocate(NBYTES), 0).result()
    assert len(open_below(directory)) == 3  # two of the file, one of the lock
    backend.close()
    assert open_below(directory, memory_directory) == []


def test_a_backend_that_is_dropped_leaves_no_threads_descriptors_or_locks(directory):
    others = set(threading.enumerate())
    backend = PosixBackend()
    file = backend.create(f"{directory}/file", NBYTES)
    file.write(backend.allocate(NBYTES), 0).result()
    file.read(backend.allocate(NBYTES), 0).result()
    backend.lock(directory)
    threads = set(threading.enumerate()) - others
    assert len(threads) == 4
    assert len(open_below(directory)) == 3
    del backend, file
    wait_for_release(lambda: not any(thread.is_alive() for thread in threads))
    wait_for_release(lambda: open_below(directory) == [])


def test_writes_do_not_delay_reads(backend, directory, kernel):
    file = backend.create(f"{directory}/file", NBYTES)
    gate = threading.Event()

    def hold_writes(name, real, fd, view, offset):
        if name == "pwritev":
            assert gate.wait(60)
        return real(fd, [view], offset)

    kernel.start(hold_writes)
    trailing = [file.write(backend.allocate(NBYTES), 0) for _ in range(10)]
    try:
        assert file.read(backend.allocate(NBYTES), 0).result(60) == NBYTES
        assert not any(future.done() for future in trailing)
        with pytest.raises(TimeoutError):
            trailing[0].result(timeout=0.001)
    finally:
        gate.set()
    assert [future.result(60) for future in trailing] == [NBYTES] * 10


def test_a_forked_child_refuses_to_wait_for_threads_that_it_does_not_have(
    backend, directory, kernel
):
    file = backend.create(f"{directory}/file", NBYTES)
    buffer = backend.allocate(NBYTES)
    gate, started = threading.Event(), threading.Event()

    def hold(name, real, fd, view, offset):
        started.set()
        assert gate.wait(60)
        return real(fd, [view], offset)

    kernel.start(hold)
    in_flight = file.write(buffer, 0)
    assert started.wait(60)
    child = os.fork()
    if child == 0:
        signal.alarm(120)  # ends a child that waits
        refused = 0
        for operation in (
            lambda: file.read(buffer, 0).result(),
            lambda: file.write(buffer, 0).result(),
            lambda: backend.create(f"{directory}/child", 1),
            backend.counters,
        ):
            try:
                operation()
            except StorageError as error:
                refused += "after a fork" in str(error)
        file.close()
        backend.close()
        os._exit(refused)
    try:
        _, status = os.waitpid(child, 0)
    finally:
        gate.set()
    assert os.waitstatus_to_exitcode(status) == 4
    assert in_flight.result(60) == NBYTES
    assert file.read(buffer, 0).result(60) == NBYTES


HOLD_LOCK = """
import os, signal, sys
from gds import PosixBackend
backend = PosixBackend()
lock = backend.lock(sys.argv[1], create=True)
if os.fork() == 0:
    os.write(1, f"{os.getpid()}\\n".encode())
    sys.stdin.read()
    os._exit(0)
signal.pause()
"""


def can_be_locked(backend: PosixBackend, path: str) -> bool:
    try:
        backend.lock(path).release()
    except LockHeldError:
        return False
    return True


@contextmanager
def dead_holder_of(backend: PosixBackend, lock: str, script: str) -> Iterator[int]:
    """Give the pid of a child that lives; the process that took the lock and forked it is dead."""
    holder = subprocess.Popen(
        dying([sys.executable, "-c", script, lock]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    with holder.stdin, holder.stdout:
        try:
            child = int(holder.stdout.readline())
            with pytest.raises(LockHeldError):
                backend.lock(lock)
        finally:
            holder.kill()
            holder.wait()
        os.kill(child, 0)  # it lives
        yield child


def test_a_lock_can_be_taken_when_its_holder_died_and_a_forked_child_lives(backend, directory):
    with dead_holder_of(backend, f"{directory}/LOCK", HOLD_LOCK):
        backend.lock(f"{directory}/LOCK")


def test_a_child_that_was_forked_past_python_has_the_lock_of_its_dead_parent(backend, directory):
    """Nobody tells the child to let go: a limit, which docs/evidence.md names."""
    script = HOLD_LOCK.replace("os.fork()", "__import__('ctypes').PyDLL(None).fork()")
    with dead_holder_of(backend, f"{directory}/LOCK", script) as child:
        with pytest.raises(LockHeldError):
            backend.lock(f"{directory}/LOCK")
        os.kill(child, signal.SIGKILL)
        wait_for(lambda: can_be_locked(backend, f"{directory}/LOCK"))


@pytest.mark.parametrize("replaced", [True, False], ids=["replaced", "gone"])
def test_what_is_renamed_between_opening_and_locking_is_not_what_was_asked_for(
    backend, directory, monkeypatch, replaced
):
    """What a reader wants to lock may be recycled, and get another name, just before it is."""
    path, aside = f"{directory}/step", f"{directory}/slot"
    os.mkdir(path)
    real = fcntl.flock

    def rename_then_lock(fd, operation):
        if not os.path.exists(aside):
            os.rename(path, aside)
            if replaced:
                os.mkdir(path)
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", rename_then_lock)
    if replaced:
        held = backend.lock(path)
        assert held.is_current()
    else:
        with pytest.raises(StorageError, match="No such file"):
            backend.lock(path)
    backend.lock(aside).release()  # nobody holds it
    if replaced:
        with pytest.raises(LockHeldError):
            backend.lock(path)


def test_a_program_that_ends_with_transfers_in_flight_ends(directory):
    script = """
import os, sys, threading
real, started = os.pwritev, threading.Event()
def stuck(*arguments):
    started.set()
    threading.Event().wait()
os.pwritev = stuck
from gds import PosixBackend
backend = PosixBackend()
file = backend.create(sys.argv[1], 4096)
lock = backend.lock(sys.argv[1])
futures = [file.write(backend.allocate(4096), 0) for _ in range(10)]
started.wait()
print("ends")
"""
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", script, f"{directory}/file"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=240,
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("ends\n", "", 0)
