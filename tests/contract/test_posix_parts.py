"""Transfers that the posix backend cuts into parts, and changes of how it does that.

The contract of `test_backends.py` runs in parts, too: bytes, counters and reads past the end.
"""

import errno
import os
import threading

import pytest

from gds import ALIGNMENT, PosixBackend, StorageError
from tests.contract.conftest import wait_for

REQUEST_BYTES = 4 * ALIGNMENT
NUM_PARTS = 4
NBYTES = NUM_PARTS * REQUEST_BYTES


@pytest.fixture
def backend(directory):
    backend = PosixBackend(direct=True, request_bytes=REQUEST_BYTES)
    yield backend
    backend.close()


class Gate:
    """Holds the kernel's calls back, each at its offset, until they are let through."""

    def __init__(self):
        self.opened = threading.Event()
        self.arrived = threading.Semaphore(0)

    def __call__(self, name, real, fd, view, offset):
        self.arrived.release()
        assert self.opened.wait(60)
        return real(fd, [view], offset)


@pytest.mark.parametrize("request_bytes", [0, -ALIGNMENT, ALIGNMENT + 512])
def test_a_request_size_that_would_misalign_parts_is_refused(backend, request_bytes):
    with pytest.raises(ValueError, match=f"multiple of {ALIGNMENT}.*got {request_bytes}"):
        PosixBackend(request_bytes=request_bytes)
    with pytest.raises(ValueError, match=f"multiple of {ALIGNMENT}"):
        backend.tune(read_threads=1, write_threads=1, request_bytes=request_bytes)


@pytest.mark.parametrize("verb", ["read", "write"])
def test_parts_run_at_once_and_the_future_waits_for_all(backend, directory, kernel, verb):
    file = backend.create(f"{directory}/file", 2 * REQUEST_BYTES)
    gate = Gate()
    kernel.start(gate)
    future = getattr(file, verb)(backend.allocate(2 * REQUEST_BYTES), 0)
    for _ in range(2):
        assert gate.arrived.acquire(timeout=60)
    assert not future.done()
    gate.opened.set()
    assert future.result(60) == 2 * REQUEST_BYTES


# Errors


@pytest.mark.parametrize("verb", ["read", "write"])
def test_an_error_in_one_part_is_the_transfers(backend, directory, kernel, verb):
    file = backend.create(f"{directory}/file", 2 * NBYTES)

    def fail_third(name, real, fd, view, offset):
        if offset == NBYTES + 2 * REQUEST_BYTES:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, [view], offset)

    kernel.start(fail_third)
    called = []
    future = getattr(file, verb)(backend.allocate(NBYTES), NBYTES)
    future.add_done_callback(called.append)
    with pytest.raises(StorageError) as caught:
        future.result(60)
    error = caught.value
    assert (error.errno, error.filename) == (errno.EIO, f"{directory}/file")
    assert error.offset == NBYTES
    start, stop = 2 * REQUEST_BYTES, 3 * REQUEST_BYTES
    assert f"{verb} of {NBYTES} bytes, 0 done of the part from {start} to {stop}" in str(error)
    wait_for(lambda: called)
    assert called == [future]
    counters = backend.counters()
    assert (counters.bytes_read, counters.num_reads) == (0, 0)
    assert (counters.bytes_written, counters.num_writes) == (0, 0)
    assert file.write(backend.allocate(NBYTES), 0).result() == NBYTES


def test_the_first_error_wins_and_what_had_not_begun_is_left(directory, kernel):
    backend = PosixBackend(direct=True, write_threads=1, request_bytes=REQUEST_BYTES)
    file = backend.create(f"{directory}/file", NBYTES)
    numbers = [errno.ENOSPC, errno.EIO]

    def fail(name, real, fd, view, offset):
        if offset == 0:
            return real(fd, [view], offset)
        number = numbers.pop(0)
        raise OSError(number, os.strerror(number))

    kernel.start(fail)
    with pytest.raises(StorageError) as caught:
        file.write(backend.allocate(NBYTES), 0).result(60)
    assert caught.value.errno == errno.ENOSPC
    assert [offset for _, _, offset, _ in kernel.calls] == [0, REQUEST_BYTES]
    backend.close()


def test_a_failed_transfer_resolves_only_when_no_part_uses_the_memory(backend, directory, kernel):
    file = backend.create(f"{directory}/file", 2 * REQUEST_BYTES)
    gate, failed = Gate(), threading.Event()

    def fail_first(name, real, fd, view, offset):
        if offset:
            return gate(name, real, fd, view, offset)
        assert gate.arrived.acquire(timeout=60)
        failed.set()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    kernel.start(fail_first)
    future = file.read(backend.allocate(2 * REQUEST_BYTES), 0)
    assert failed.wait(60)
    with pytest.raises(TimeoutError):
        future.result(timeout=0.05)
    gate.opened.set()
    with pytest.raises(StorageError):
        future.result(60)


# Ends, and what is kept until then


# Tuning


def test_tuning_applies_to_the_next_transfer(backend, directory, kernel):
    assert (backend.read_threads, backend.write_threads) == (2, 2)
    assert backend.request_bytes == REQUEST_BYTES
    file = backend.create(f"{directory}/file", NBYTES)
    kernel.start()
    for request_bytes, num_calls in [(None, 1), (NBYTES // 2, 2), (ALIGNMENT, 16)]:
        backend.tune(read_threads=1, write_threads=3, request_bytes=request_bytes)
        kernel.calls.clear()
        file.write(backend.allocate(NBYTES), 0).result()
        assert len(kernel.calls) == num_calls
        assert backend.request_bytes == request_bytes
    assert (backend.read_threads, backend.write_threads) == (1, 3)


def test_a_refused_tuning_changes_nothing(backend):
    before = (backend.read_threads, backend.write_threads, backend.request_bytes)
    good = {"read_threads": 7, "write_threads": 7, "request_bytes": ALIGNMENT}
    for bad in ({"read_threads": 0}, {"write_threads": -1}, {"request_bytes": 1}):
        with pytest.raises(ValueError, match=str(*bad.values())):
            backend.tune(**good | bad)
    assert (backend.read_threads, backend.write_threads, backend.request_bytes) == before
    backend.close()
    with pytest.raises(StorageError, match="closed"):
        backend.tune(**good)


def test_more_threads_help_what_is_queued_and_fewer_lose_none_of_it(backend, directory, kernel):
    backend.tune(read_threads=1, write_threads=1, request_bytes=REQUEST_BYTES)
    file = backend.create(f"{directory}/file", NBYTES)
    gate = Gate()
    kernel.start(gate)
    futures = [file.write(backend.allocate(NBYTES), 0)]
    assert gate.arrived.acquire(timeout=60)
    assert not gate.arrived.acquire(timeout=0.05)  # one thread, one part
    backend.tune(read_threads=1, write_threads=3, request_bytes=REQUEST_BYTES)
    for _ in range(2):
        assert gate.arrived.acquire(timeout=60)
    backend.tune(read_threads=1, write_threads=1, request_bytes=None)
    futures.append(file.write(backend.allocate(NBYTES), 0))
    gate.opened.set()
    assert [future.result(60) for future in futures] == [NBYTES, NBYTES]
    assert len(kernel.calls) == NUM_PARTS + 1
