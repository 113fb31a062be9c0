"""The posix backend's transfers that fall short or fail.

A fault is real where one can be had (a resource limit, a full disk, a truncated file) and a
replaced `os.preadv` or `os.pwritev` where not; each test shows that it happened.
"""

import errno
import os
import threading
from pathlib import Path

import pytest

from gds import ALIGNMENT, PosixBackend, ShortReadError, StorageError, libc
from gds.testing._harness import new_file
from tests.contract.conftest import random_source
from tests.eventually import eventually

A = ALIGNMENT
NBYTES = 16 * ALIGNMENT
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("direct", "verb", "most_bytes"),
    [
        (True, "read", 511),
        (True, "read", A),
        (True, "write", 1),
        (True, "write", A + 100),
        (True, "write", 5 * A + 1),
        (False, "read", A - 1),
        (False, "write", A + 100),
    ],
)
def test_short_transfers_are_completed(directory, kernel, direct, verb, most_bytes):
    backend = PosixBackend(direct=direct)
    nbytes = NBYTES + 100
    file = backend.create(f"{directory}/file", nbytes)
    source, data = random_source(backend, nbytes)
    into = backend.allocate(nbytes)
    if verb == "read":
        file.write(source, 0).result()

    def short(name, real, fd, view, offset):
        if not kernel.is_direct(fd):
            return real(fd, [view[: max(most_bytes, 512)]], offset)
        # A direct descriptor takes no odd length, so this does what a short one would have done:
        # the start of the data is moved, by another way, and the rest is not.
        moved = min(len(view), most_bytes)
        if name == "pwritev":
            with open(f"{directory}/file", "r+b", buffering=0) as aside:
                aside.seek(offset)
                return aside.write(view[:moved])
        real(fd, [view], offset)
        view[moved:] = bytes(len(view) - moved)
        return moved

    kernel.start(short)
    moved = (file.read(into, 0) if verb == "read" else file.write(source, 0)).result()
    assert moved == nbytes
    assert len(kernel.calls) > 2
    assert all(offset % ALIGNMENT == 0 for _, direct, offset, _ in kernel.calls if direct)
    if verb == "write":
        assert Path(directory, "file").read_bytes() == data
    else:
        assert bytes(into.memoryview()) == data
    backend.close()


def test_a_file_truncated_behind_our_back_is_a_short_read_and_not_a_loop(backend, directory):
    path = f"{directory}/file"
    file = backend.create(path, NBYTES)
    for left in (5 * ALIGNMENT + 100, 4 * ALIGNMENT, 17, 0):
        os.truncate(path, left)
        with pytest.raises(ShortReadError, match=f"{NBYTES} bytes, {left} done") as caught:
            file.read(backend.allocate(NBYTES), 0).result()
        assert (caught.value.filename, caught.value.offset) == (path, 0)
        assert isinstance(caught.value, EOFError)


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
def test_a_write_that_takes_nothing_is_an_error(directory, kernel, direct):
    backend = PosixBackend(direct=direct)
    file = backend.create(f"{directory}/file", NBYTES)
    kernel.start(lambda *_: 0)
    with pytest.raises(StorageError, match="0 done") as caught:
        file.write(backend.allocate(NBYTES), 0).result()
    assert caught.value.errno == errno.EIO
    backend.close()


@pytest.mark.parametrize(("verb", "number"), [("read", errno.EIO), ("write", errno.ENOSPC)])
def test_an_error_carries_number_path_offset_and_progress(backend, directory, kernel, verb, number):
    file = backend.create(f"{directory}/file", NBYTES)
    file.path = f"{directory}/renamed"

    def fail_at(name, real, fd, view, offset):
        if offset >= 3 * ALIGNMENT:
            raise OSError(number, os.strerror(number))
        return real(fd, [view[: 3 * ALIGNMENT - offset]], offset)

    kernel.start(fail_at)
    with pytest.raises(StorageError) as caught:
        getattr(file, verb)(backend.allocate(4 * ALIGNMENT), ALIGNMENT).result()
    error = caught.value
    assert error.errno == number
    assert (error.filename, error.offset) == (f"{directory}/renamed", ALIGNMENT)
    assert f"{verb} of {4 * ALIGNMENT} bytes, {2 * ALIGNMENT} done" in str(error)
    assert file.read_bytes(0, 1) == b"\0"
    assert backend.counters().bytes_written == backend.counters().bytes_read == 0


def test_an_interrupted_transfer_goes_on(backend, directory, kernel):
    file = backend.create(f"{directory}/file", NBYTES)
    source, data = random_source(backend)
    left = [errno.EINTR, errno.EAGAIN, errno.EINTR]

    def interrupted(name, real, fd, view, offset):
        if left:
            raise OSError(left.pop(), "not now")
        return real(fd, [view], offset)

    kernel.start(interrupted)
    assert file.write(source, 0).result() == NBYTES
    assert left == []
    assert file.read_bytes(0, NBYTES) == data


@pytest.mark.parametrize("call", ["fdatasync", "fsync"])
def test_a_failed_sync_is_reported_and_not_retried(backend, directory, monkeypatch, call):
    file = backend.create(f"{directory}/file", NBYTES)
    calls = []

    def fail(fd):
        calls.append(fd)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, call, fail)
    path = f"{directory}/file" if call == "fdatasync" else directory
    with pytest.raises(StorageError) as caught:
        file.sync() if call == "fdatasync" else backend.sync_dir(directory)
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, path)
    assert len(calls) == 1
    assert backend.counters().num_syncs == 0


@pytest.mark.parametrize("closed", ["source", "target"])
def test_closing_a_file_waits_for_a_clone_of_it(tmp_path, monkeypatch, closed):
    """Else another file could get the number of its descriptor, and be the one that is cloned."""
    backend = PosixBackend()
    files = {name: new_file(backend, f"{tmp_path}/{name}") for name in ("source", "target")}
    closing = threading.Thread(target=files[closed].close)
    found: list[int] = []

    def clone_range(fd, source_fd, offset, nbytes):
        closing.start()
        assert eventually(lambda: files[closed]._closed)
        found.extend(os.fstat(number).st_ino for number in (source_fd, fd))

    monkeypatch.setattr(libc, "clone_range", clone_range)
    assert files["target"].clone(files["source"], 0, ALIGNMENT)
    closing.join()
    names = ("source", "target")
    assert found == [os.stat(tmp_path / name).st_ino for name in names]
    with pytest.raises(StorageError, match="closed"):
        files["target"].clone(files["source"], 0, ALIGNMENT)
    backend.close()
