"""The posix backend's transfers: what goes direct, what falls back, what falls short or fails.

A fault is real where one can be had (a resource limit, tmpfs, a truncated file) and a replaced
`os.preadv` or `os.pwritev` where not; each test shows that it happened.
"""

import errno
import functools
import os
import random
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest

from gds import ALIGNMENT, PosixBackend, ShortReadError, StorageError, libc, probe
from gds.backends.transfer import direct_part
from gds.testing._harness import fails_with, new_file
from tests.eventually import eventually

NBYTES = 16 * ALIGNMENT
ROOT = Path(__file__).parents[2]


def random_source(backend, nbytes=NBYTES):
    source = backend.allocate(nbytes)
    data = random.Random(nbytes).randbytes(nbytes)
    source.memoryview()[:] = data
    return source, data


# Which part of a request goes where


@pytest.mark.parametrize(
    ("offset", "nbytes", "address", "expected"),
    [
        pytest.param(0, 8192, 0, (0, 8192), id="all-aligned"),
        pytest.param(4096, 10000, 4096, (0, 8192), id="partial-tail"),
        pytest.param(4000, 8292, 4000, (96, 8288), id="head-with-memory-in-phase"),
        pytest.param(4000, 8292, 0, (0, 0), id="head-with-memory-out-of-phase"),
        pytest.param(1, 4096, 1, (0, 0), id="no-whole-block"),
        pytest.param(100, 50, 100, (0, 0), id="within-a-block"),
        pytest.param(0, 8192, 512, (0, 8192), id="memory-at-a-sector"),
        pytest.param(0, 8192, 511, (0, 0), id="memory-misaligned"),
        pytest.param(0, 0, 0, (0, 0), id="empty"),
    ],
)
def test_whole_blocks_with_fitting_memory_go_direct(offset, nbytes, address, expected):
    assert direct_part(offset, nbytes, address, 512) == expected


def test_head_and_tail_are_buffered_and_the_body_is_direct(backend, directory, kernel):
    file = backend.create(f"{directory}/file", NBYTES)
    source = backend.allocate(NBYTES).slice(100, 3 * ALIGNMENT)
    kernel.start()
    file.write(source, ALIGNMENT + 100).result()
    file.read(source, ALIGNMENT + 100).result()
    expected = [
        (False, ALIGNMENT + 100, ALIGNMENT - 100),
        (True, 2 * ALIGNMENT, 2 * ALIGNMENT),
        (False, 4 * ALIGNMENT, 100),
    ]
    assert kernel.calls == [("pwritev", *call) for call in expected] + [
        ("preadv", *call) for call in expected
    ]


def test_small_ranges_and_misaligned_memory_are_buffered(backend, directory, kernel):
    file = backend.create(f"{directory}/file", NBYTES)
    kernel.start()
    file.read(backend.allocate(NBYTES + 1).slice(1, NBYTES), 0).result()
    file.read_bytes(0, NBYTES)
    file.write_bytes(bytes(NBYTES), 0)
    assert [direct for _, direct, _, _ in kernel.calls] == [False] * 3


def test_direct_false_never_opens_a_direct_descriptor(directory, kernel):
    backend = PosixBackend(direct=False)
    file = backend.create(f"{directory}/file", NBYTES)
    kernel.start()
    file.read(backend.allocate(NBYTES), 0).result()
    assert kernel.calls == [("preadv", False, 0, NBYTES)]
    assert (file.direct, file.alignment) == (False, 1)
    assert "direct=False" in backend.capabilities(directory).reason
    backend.close()


def test_an_alignment_above_the_layouts_is_buffered(directory, monkeypatch):
    monkeypatch.setattr(libc, "direct_alignment", lambda _: (512, 16384))
    backend = PosixBackend()
    with pytest.warns(probe.DirectIOUnavailable, match="16384"):
        file = backend.create(f"{directory}/file", NBYTES)
    assert not file.direct
    assert not backend.capabilities(directory).direct
    backend.close()


# Falling back


def test_a_fallback_warns_once_and_names_directory_and_consequence(memory_directory):
    backend = PosixBackend()
    with pytest.warns(probe.DirectIOUnavailable) as caught:
        file = backend.create(f"{memory_directory}/first", NBYTES + 5)
    (warning,) = caught
    assert memory_directory in str(warning.message)
    assert "tmpfs" in str(warning.message)
    assert "page cache" in str(warning.message)
    assert warning.filename == __file__
    # A second warning would be an error.
    backend.create(f"{memory_directory}/second", 1)
    backend.open(f"{memory_directory}/first")
    assert (file.direct, file.alignment) == (False, 1)
    source, data = random_source(backend)
    file.write(source, 5).result()
    file.sync()
    assert file.read_bytes(5, NBYTES) == data
    backend.close()


def test_demanding_direct_io_refuses_to_fall_back(memory_directory):
    backend = PosixBackend(direct=True)
    with pytest.raises(StorageError, match="tmpfs") as caught:
        backend.create(f"{memory_directory}/file", NBYTES)
    assert caught.value.errno == errno.EOPNOTSUPP
    assert backend.list_dir(memory_directory) == []
    backend.close()


@pytest.fixture
def refusing_kernel(kernel):
    """Refuses direct transfers from the moment it is started."""

    def refuse(name, real, fd, view, offset):
        if kernel.is_direct(fd):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, [view], offset)

    kernel.start = functools.partial(kernel.start, refuse)
    return kernel


def test_a_file_system_that_refuses_at_the_first_read_is_found_out(directory, refusing_kernel):
    refusing_kernel.start()
    backend = PosixBackend()
    with pytest.warns(probe.DirectIOUnavailable, match="a direct read was refused"):
        file = backend.create(f"{directory}/file", NBYTES)
    assert [direct for _, direct, _, _ in refusing_kernel.calls] == [True]
    assert not file.direct
    assert not backend.capabilities(directory).direct
    backend.close()


def test_a_transfer_that_is_refused_later_is_done_buffered_with_one_warning(
    directory, refusing_kernel
):
    backend = PosixBackend()
    file, other = (backend.create(f"{directory}/{name}", NBYTES) for name in "ab")
    assert file.direct
    refusing_kernel.start()
    source, data = random_source(backend)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert file.write(source, 0).result() == NBYTES
        assert file.write(source, 0).result() == NBYTES
        assert other.write(source, 0).result() == NBYTES
        assert not backend.create(f"{directory}/c", NBYTES).direct
    assert [warning.category for warning in caught] == [probe.DirectIOUnavailable]
    assert directory in str(caught[0].message)
    assert [direct for _, direct, _, _ in refusing_kernel.calls] == [
        True,
        False,
        False,
        True,
        False,
    ]
    assert not file.direct
    assert file.read_bytes(0, NBYTES) == data
    backend.close()


def test_a_transfer_that_is_refused_later_fails_where_direct_io_is_demanded(
    backend, directory, refusing_kernel
):
    file = backend.create(f"{directory}/file", NBYTES)
    refusing_kernel.start()
    with pytest.raises(StorageError, match="direct=True"):
        file.write(backend.allocate(NBYTES), 0).result()


# Short counts and errors


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
@pytest.mark.parametrize("verb", ["read", "write"])
@pytest.mark.parametrize(
    "most_bytes", [1, 511, 512, ALIGNMENT - 1, ALIGNMENT, ALIGNMENT + 100, 5 * ALIGNMENT + 1]
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


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("verb", ["read", "write"])
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


@pytest.mark.parametrize("number", [errno.EINTR, errno.EAGAIN])
def test_an_interrupted_transfer_goes_on(backend, directory, kernel, number):
    file = backend.create(f"{directory}/file", NBYTES)
    source, data = random_source(backend)
    left = [number] * 3

    def interrupted(name, real, fd, view, offset):
        if left:
            raise OSError(left.pop(), "not now")
        return real(fd, [view], offset)

    kernel.start(interrupted)
    assert file.write(source, 0).result() == NBYTES
    assert left == []
    assert file.read_bytes(0, NBYTES) == data


LIMITED_WRITE = """
import resource, sys
from gds import PosixBackend, StorageError
size, limit = 1 << 20, 614400
backend = PosixBackend(direct=True)
file = backend.create(sys.argv[1], size)
source = backend.allocate(size - 4096)
source.memoryview()[:] = b"x" * source.nbytes
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    file.write(source, 4096).result()
except StorageError as error:
    print(error.errno, error.offset, f"{limit - 4096} done" in str(error))
backend.close()
"""


def test_a_real_limit_is_a_short_write_and_then_its_error(directory):
    # In a child, because the limit is the whole process's.
    done = subprocess.run(
        [sys.executable, "-c", LIMITED_WRITE, f"{directory}/file"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert (done.stdout, done.stderr) == (f"{errno.EFBIG} 4096 True\n", "")
    data = Path(directory, "file").read_bytes()
    assert len(data) == 1 << 20
    assert data.rstrip(b"\0") == bytes(4096) + b"x" * (614400 - 4096)


FULL_DISK = """
import os, sys, warnings
from gds import PosixBackend, StorageError
warnings.simplefilter("ignore")
backend = PosixBackend()
try:
    backend.create("reserved", 2 << 20)
except StorageError as error:
    print(error.errno, error.filename, os.listdir("."))
with open("sparse", "xb") as file:
    file.truncate(2 << 20)
file = backend.open("sparse", writable=True)
try:
    file.write(backend.allocate((2 << 20) - 100), 100).result()
except StorageError as error:
    print(error.errno, error.filename, error.offset, "1048476 done" in str(error))
backend.close()
"""


def test_a_full_disk_is_reported_by_create_and_by_a_write_into_a_hole(tmp_path):
    # A mount of its own, in a mount namespace of its own: nothing is left of it afterwards.
    mount = 'mount -t tmpfs -o size=1m none "$1" && cd "$1" && echo mounted && exec "$2" -c "$3"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mount, "sh", tmp_path, sys.executable, FULL_DISK],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    lines = done.stdout.splitlines()
    if not lines:
        pytest.skip(f"no mounts without privileges: {done.stderr.strip()}")
    assert done.stderr == ""
    assert lines == [
        "mounted",
        f"{errno.ENOSPC} reserved []",
        f"{errno.ENOSPC} sparse 100 True",
    ]


@pytest.mark.parametrize("call", ["fdatasync", "fsync"])
def test_a_failed_sync_is_reported_and_not_retried(backend, directory, monkeypatch, call):
    file = backend.create(f"{directory}/file", NBYTES)
    calls = []

    def fail(fd: int) -> None:
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
def test_closing_a_file_waits_for_a_clone_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: str
) -> None:
    """Else another file could get the number of its descriptor, and be the one that is cloned."""
    backend = PosixBackend()
    files = {name: new_file(backend, f"{tmp_path}/{name}") for name in ("source", "target")}
    closing = threading.Thread(target=files[closed].close)
    found: list[int] = []

    def clone_range(fd: int, source_fd: int, offset: int, nbytes: int) -> None:
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


@pytest.mark.parametrize("number", ["EIO", "ENOSPC"])
def test_a_clone_that_fails_is_an_error_that_names_file_and_offset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: str
) -> None:
    def fails(*_: int) -> None:
        raise OSError(getattr(errno, number), "injected")

    backend = PosixBackend()
    source, target = (new_file(backend, f"{tmp_path}/{name}") for name in ("source", "target"))
    monkeypatch.setattr(libc, "clone_range", fails)
    with fails_with(number) as caught:
        target.clone(source, ALIGNMENT, ALIGNMENT)
    assert (caught.value.filename, caught.value.offset) == (f"{tmp_path}/target", ALIGNMENT)
    backend.close()


@pytest.mark.parametrize("hybrid", [False, True], ids=["plain", "hybrid"])
@pytest.mark.parametrize("opened", ["direct", "buffered"])
@pytest.mark.parametrize("again", ["direct", "buffered"])
def test_what_is_doubted_comes_from_the_device_and_by_the_way_that_was_asked_for(
    directory, kernel, opened, again, hybrid
):
    """A page that was read wrong into the page cache would be read wrong from there for ever."""
    if hybrid and opened == "buffered":
        pytest.skip("hybrid forbids it")
    backend = PosixBackend(direct=opened == "direct", hybrid=hybrid)
    path = f"{directory}/file"
    file = backend.create(path, NBYTES)
    source, data = random_source(backend)
    file.write(source, 0).result()
    file.sync()
    assert file.read_bytes(0, NBYTES) == data
    with open(path, "rb") as whole:
        fd = whole.fileno()
        if libc.cached_bytes(fd, NBYTES, 0) is None:
            pytest.skip("this kernel does not say what the page cache holds")
        assert libc.cached_bytes(fd, NBYTES, 0) >= NBYTES
        cached = []

        def look(name, real, direct_fd, view, offset):
            cached.append(libc.cached_bytes(fd, NBYTES, 0))
            return real(direct_fd, [view], offset)

        kernel.start(look)
        into = backend.allocate(NBYTES)
        file.read_again(into, 0, direct=again == "direct").result()
    assert bytes(into.memoryview()) == data
    assert cached[0] == 0
    ways = {"direct" if direct else "buffered" for _, direct, _, _ in kernel.calls}
    assert ways == ({"direct"} if (opened, again) == ("direct", "direct") else {"buffered"})
    backend.close()
