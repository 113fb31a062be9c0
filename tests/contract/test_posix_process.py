"""The posix backend's names, locks, descriptors and threads, through forks, deaths and exits."""

import errno
import fcntl
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gds import ALIGNMENT, LockHeldError, PosixBackend, StorageError, libc
from gds.backends.threads import Meter, TransferPool
from tests.contract.conftest import open_below, wait_for, wait_for_release
from tests.dying import dying

NBYTES = 16 * ALIGNMENT
ROOT = Path(__file__).parents[2]


# Names


def test_files_get_the_umask_and_every_block_of_their_size(backend, directory):
    before = os.umask(0o027)
    try:
        backend.create(f"{directory}/file", NBYTES + 1).close()
    finally:
        os.umask(before)
    found = os.stat(f"{directory}/file")
    assert found.st_mode & 0o777 == 0o640
    assert found.st_blocks * 512 >= NBYTES + 1


def test_a_pipe_is_refused_at_once(backend, directory):
    os.mkfifo(f"{directory}/pipe")
    with pytest.raises(StorageError, match="regular"):
        backend.open(f"{directory}/pipe")
    with pytest.raises(StorageError, match="neither"):
        backend.lock(f"{directory}/pipe")
    found = backend.stat(f"{directory}/pipe")
    assert found is not None
    assert found.kind == "other"


def test_renames_work_where_the_kernel_has_no_flags_for_them(backend, directory, monkeypatch):
    monkeypatch.setattr(libc, "_function", lambda _: None)
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

    def replace_first(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            os.replace(f"{directory}/other", f"{directory}/file")
        return real_open(path, flags, mode)

    monkeypatch.setattr(os, "open", replace_first)
    with pytest.raises(StorageError, match="replaced"):
        backend.open(f"{directory}/file")
    assert not Path(directory, "other").exists()
    assert open_below(directory) == []


def test_a_lock_is_on_what_the_name_refers_to_when_it_returns(backend, directory, monkeypatch):
    for name in ("LOCK", "new"):
        Path(directory, name).touch()
    real_flock = fcntl.flock
    swapped = []

    def swap_first(fd: int, operation: int) -> None:
        if not swapped:
            swapped.append(fd)
            os.replace(f"{directory}/new", f"{directory}/LOCK")
        real_flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", swap_first)
    backend.lock(f"{directory}/LOCK")
    assert swapped
    other = PosixBackend()
    with pytest.raises(LockHeldError):
        other.lock(f"{directory}/LOCK")
    other.close()


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


def test_a_finished_transfer_keeps_neither_buffer_nor_file(backend, directory):
    file = backend.create(f"{directory}/file", NBYTES)
    buffer = backend.allocate(NBYTES)
    futures = [file.write(buffer, 0), file.read(buffer, 0)]
    for future in futures:
        future.result()
    refs = [weakref.ref(buffer), weakref.ref(file)]
    del buffer, file
    # The worker drops its references just after the result.
    wait_for(lambda: [ref() for ref in refs] == [None, None])


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


def test_a_callback_may_close_the_file_and_the_backend(directory):
    backend = PosixBackend()
    file = backend.create(f"{directory}/file", NBYTES)
    closed = threading.Event()

    def close(_: object) -> None:
        file.close()
        backend.close()
        closed.set()

    file.write(backend.allocate(NBYTES), 0).add_done_callback(close)
    assert closed.wait(60)


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
    """Nobody tells the child to let go: a limit, which docs/guarantees.md names."""
    script = HOLD_LOCK.replace("os.fork()", "__import__('ctypes').PyDLL(None).fork()")
    with dead_holder_of(backend, f"{directory}/LOCK", script) as child:
        with pytest.raises(LockHeldError):
            backend.lock(f"{directory}/LOCK")
        os.kill(child, signal.SIGKILL)
        wait_for(lambda: can_be_locked(backend, f"{directory}/LOCK"))


def test_another_process_sees_the_lock(backend, directory):
    held = backend.lock(f"{directory}/LOCK", create=True)
    script = (
        "import sys; from gds import LockHeldError, PosixBackend\n"
        "try: PosixBackend().lock(sys.argv[1])\n"
        "except LockHeldError: sys.exit(7)"
    )
    command = [sys.executable, "-c", script, f"{directory}/LOCK"]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 7
    held.release()
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0


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


def test_importing_the_package_loads_neither_torch_nor_numpy():
    script = "import sys, gds; sys.exit(bool({'torch', 'numpy', 'pytest'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False).returncode == 0


# Pool and meter


def test_busy_time_is_the_time_with_at_least_one_transfer(monkeypatch):
    now_s = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    meter = Meter()
    first, second = meter.transfer(10), meter.transfer(20)
    now_s = 5.0
    first.__enter__()
    now_s = 6.0
    second.__enter__()
    now_s = 8.0
    assert meter.totals() == (0, 0, 3.0)
    first.__exit__(None, None, None)
    now_s = 9.0
    second.__exit__(None, None, None)
    now_s = 100.0
    assert meter.totals() == (30, 2, 4.0)
    failed = meter.transfer(40)
    failed.__enter__()
    now_s = 101.0
    error = OSError("disk")
    assert not failed.__exit__(OSError, error, None)
    assert meter.totals() == (30, 2, 5.0)


def test_a_pool_runs_what_was_queued_before_it_closes():
    pool = TransferPool("test", 1)
    futures = [pool.submit(lambda number=number: number) for number in range(100)]
    pool.close()
    pool.close()
    assert [future.result(0) for future in futures] == list(range(100))
    with pytest.raises(RuntimeError, match="test is closed"):
        pool.submit(lambda: 0)
    with pytest.raises(ValueError, match="at least one thread"):
        TransferPool("test", 0)


def test_device_memory_is_refused_with_a_remedy(backend, directory):
    class DeviceBuffer:
        kind, nbytes, address = "device", 10, 0

    file = backend.create(f"{directory}/file", NBYTES)
    with pytest.raises(TypeError, match="allocate"):
        file.read(DeviceBuffer(), 0)


def test_a_file_cannot_be_larger_than_the_disk_allows(backend, directory):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (NBYTES, hard))
    try:
        with pytest.raises(StorageError, match=f"reserve {NBYTES + 1} bytes") as caught:
            backend.create(f"{directory}/file", NBYTES + 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert os.listdir(directory) == []
