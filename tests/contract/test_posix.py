"""The posix backend's transfers: what goes direct, what falls back, what is read again."""

import errno
import functools
import os
import warnings

import pytest

from gds import ALIGNMENT, PosixBackend, StorageError, libc, probe
from tests.contract.conftest import random_source

NBYTES = 16 * ALIGNMENT


# Which part of a request goes where


A = ALIGNMENT
WHERE = {
    "whole-blocks": (0, 2 * A, 0, [(True, 0, 2 * A)]),
    "partial-tail": (A, 2 * A + 9, A, [(True, A, 2 * A), (False, 3 * A, 9)]),
    "head-and-tail-with-memory-in-phase": (
        A + 100,
        3 * A,
        100,
        [(False, A + 100, A - 100), (True, 2 * A, 2 * A), (False, 4 * A, 100)],
    ),
    "memory-out-of-phase": (A + 100, 3 * A, 0, [(False, A + 100, 3 * A)]),
    "within-a-block": (100, 50, 100, [(False, 100, 50)]),
    "memory-between-sectors": (0, 2 * A, 511, [(False, 0, 2 * A)]),
}


@pytest.mark.parametrize(("offset", "nbytes", "address", "expected"), WHERE.values(), ids=WHERE)
def test_whole_blocks_with_fitting_memory_go_direct_and_the_rest_is_buffered(
    backend, directory, kernel, offset, nbytes, address, expected
):
    file = backend.create(f"{directory}/file", NBYTES)
    memory = backend.allocate(NBYTES + A).slice(address, nbytes)
    kernel.start()
    file.write(memory, offset).result()
    file.read(memory, offset).result()
    assert kernel.calls == [(name, *call) for name in ("pwritev", "preadv") for call in expected]
    kernel.calls.clear()
    file.write_bytes(file.read_bytes(0, NBYTES), 0)
    assert [direct for _, direct, _, _ in kernel.calls] == [False, False], "small ranges"


def test_direct_false_never_opens_a_direct_descriptor(directory, kernel):
    backend = PosixBackend(direct=False)
    file = backend.create(f"{directory}/file", NBYTES)
    kernel.start()
    file.read(backend.allocate(NBYTES), 0).result()
    assert kernel.calls == [("preadv", False, 0, NBYTES)]
    assert (file.direct, file.alignment) == (False, 1)
    assert "direct=False" in backend.capabilities(directory).reason
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


# Reading again


@pytest.mark.parametrize(
    ("opened", "again", "hybrid"),
    [
        ("direct", "direct", False),
        ("direct", "direct", True),
        ("direct", "buffered", True),
        ("buffered", "direct", False),
    ],
)
def test_what_is_doubted_comes_from_the_device_and_by_the_way_that_was_asked_for(
    directory, residency, kernel, opened, again, hybrid
):
    """A page that was read wrong into the page cache would be read wrong from there for ever."""
    backend = PosixBackend(direct=opened == "direct", hybrid=hybrid)
    path = f"{directory}/file"
    file = backend.create(path, NBYTES)
    source, data = random_source(backend)
    file.write(source, 0).result()
    file.sync()
    assert file.read_bytes(0, NBYTES) == data
    with open(path, "rb") as whole:
        fd = whole.fileno()
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
