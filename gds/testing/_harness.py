"""Fixtures and hooks of a backend's test class, and helpers of the contract tests."""

from __future__ import annotations

import errno
import random
from contextlib import AbstractContextManager
from typing import Final

import pytest

from gds.buffers.device import DeviceBuffer
from gds.contract import ALIGNMENT, Backend, Buffer, File, Stat
from gds.errors import StorageError

FILE_BYTES: Final = 9 * ALIGNMENT + 1234
"""Length of a test file in bytes: a few whole blocks and a partial one."""


class Harness:
    """Fixtures that a subclass must provide, and hooks that it may provide."""

    clones: bool | None = None
    """Whether files in the directory can be cloned; None if that is not known."""

    @pytest.fixture
    def backend(self) -> Backend:
        """Return the backend under test; the fixture closes it after the test."""
        raise NotImplementedError("provide a `backend` fixture")

    @pytest.fixture
    def directory(self) -> str:
        """Return the path of an existing, empty directory of the backend."""
        raise NotImplementedError("provide a `directory` fixture")

    def reopened(self, backend: Backend) -> Backend:  # noqa: ARG002
        """Return a new backend over the same files, as in a new process."""
        pytest.skip("this backend cannot be reopened")

    def raw(self, backend: Backend, path: str) -> bytes:  # noqa: ARG002
        """Return the bytes of a file without using the backend."""
        pytest.skip("files of this backend cannot be read without it")

    def make_symlink(self, target: str, path: str) -> None:  # noqa: ARG002
        """Make a symbolic link to `target` at `path`."""
        pytest.skip("this backend has no symbolic links")

    def make_hard_link(self, backend: Backend, target: str, path: str) -> None:  # noqa: ARG002
        """Give the file `target` a second name, `path`."""
        pytest.skip("this backend has no hard links")

    def limit(self, backend: Backend) -> AbstractContextManager[int]:  # noqa: ARG002
        """Return a context that limits the size of a file, and yields the limit in bytes."""
        pytest.skip("this backend's space cannot be limited")


def filled(backend: Backend, nbytes: int, seed: int, *, misaligned_by: int = 0) -> Buffer:
    """Return a buffer of reproducible random bytes, `misaligned_by` bytes off alignment."""
    buffer = backend.allocate(nbytes + misaligned_by).slice(misaligned_by, nbytes)
    put(buffer, random.Random(seed).randbytes(nbytes))
    return buffer


def put(buffer: Buffer, data: bytes) -> None:
    """Fill a buffer of any kind with `data`, which has the buffer's length."""
    if isinstance(buffer, DeviceBuffer):
        buffer.upload(data)
    else:
        buffer.memoryview()[:] = data


def contents(buffer: Buffer) -> bytes:
    """Return a copy of a buffer's bytes."""
    return buffer.download() if isinstance(buffer, DeviceBuffer) else bytes(buffer.memoryview())


def new_file(backend: Backend, path: str, seed: int = 1, nbytes: int = FILE_BYTES) -> File:
    """Create a file of reproducible random bytes; the file is returned open."""
    file = backend.create(path, nbytes)
    file.write(filled(backend, nbytes, seed), 0).result()
    return file


def fails_with(*names: str) -> pytest.RaisesExc[StorageError]:
    """Expect a `StorageError` with one of the error numbers, which are given by name."""
    numbers = [getattr(errno, name) for name in names]
    return pytest.RaisesExc(StorageError, check=lambda error: error.errno in numbers)


def stat_of(backend: Backend, path: str) -> Stat:
    """Return the description of a path that exists."""
    found = backend.stat(path)
    assert found is not None  # noqa: S101 - this is part of a test
    return found
