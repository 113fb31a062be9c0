"""Every backend passes the same contract."""

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from gds import (
    ALIGNMENT,
    Backend,
    Buffer,
    File,
    HybridPolicy,
    IOFuture,
    MemoryBackend,
    PosixBackend,
    WrapperBackend,
)
from gds.backends import WrapperFile
from gds.testing import BackendContract
from tests.contract.conftest import FilesOnADrive

LIMIT_BYTES = 1 << 20


class PosixContract(FilesOnADrive):
    arguments: ClassVar[dict[str, Any]]

    @pytest.fixture
    def backend(self, directory: str) -> Iterator[Backend]:
        backend = PosixBackend(**self.arguments)
        yield backend
        backend.close()

    def reopened(self, backend: Backend) -> Backend:
        return PosixBackend(**self.arguments)

    @contextlib.contextmanager
    def limit(self, backend: Backend) -> Iterator[int]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, hard))
        try:
            yield LIMIT_BYTES
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class TestPosixDirect(PosixContract, BackendContract):
    arguments: ClassVar = {"direct": True}


class TestPosixBufferedInParts(PosixContract, BackendContract):
    arguments: ClassVar = {"direct": False, "request_bytes": ALIGNMENT}

    @pytest.fixture
    def directory(self, tmp_path: Path) -> str:
        return str(tmp_path)


class TestHybridOfBothModes(PosixContract, BackendContract):
    """Limits within the sizes of the contract's requests, so that they mix on every file."""

    policy = HybridPolicy(
        write_bytes=3 * ALIGNMENT, read_bytes=2 * ALIGNMENT, unaligned_bytes=4 * ALIGNMENT
    )
    arguments: ClassVar = {"direct": True, "hybrid": policy, "request_bytes": 4 * ALIGNMENT}


class TestMemory(BackendContract):
    clones: bool | None = False

    @pytest.fixture
    def directory(self) -> str:
        return "/some/where"

    @pytest.fixture
    def backend(self, directory: str) -> Iterator[Backend]:
        backend = MemoryBackend(
            directories=[directory], capacity_bytes=32 * LIMIT_BYTES, clones=bool(self.clones)
        )
        yield backend
        backend.close()

    def reopened(self, backend: Backend) -> Backend:
        assert isinstance(backend, MemoryBackend)
        return backend.reopened()

    def raw(self, backend: Backend, path: str) -> bytes:
        with self.reopened(backend) as successor, successor.open(path) as file:
            return file.read_bytes(0, file.size_bytes)

    def make_hard_link(self, backend: Backend, target: str, path: str) -> None:
        assert isinstance(backend, MemoryBackend)
        backend.link(target, path)

    @contextlib.contextmanager
    def limit(self, backend: Backend) -> Iterator[int]:
        yield 32 * LIMIT_BYTES


class TestWrapperOverMemoryThatClones(TestMemory):
    clones = True

    @pytest.fixture
    def backend(self, directory: str) -> Iterator[Backend]:
        capacity = 32 * LIMIT_BYTES
        inner = MemoryBackend(directories=[directory], capacity_bytes=capacity, clones=True)
        backend = WrapperBackend(inner)
        yield backend
        backend.close()

    def reopened(self, backend: Backend) -> Backend:
        assert isinstance(backend, WrapperBackend)
        return WrapperBackend(super().reopened(backend.inner))

    def make_hard_link(self, backend: Backend, target: str, path: str) -> None:
        assert isinstance(backend, WrapperBackend)
        super().make_hard_link(backend.inner, target, path)


class ShiftedFile(WrapperFile):
    """Reads from one byte further on."""

    def read(self, into: Buffer, offset: int) -> IOFuture:
        return super().read(into, offset + 1)


class ShiftedBackend(WrapperBackend):
    def wrap_file(self, file: File) -> File:
        return ShiftedFile(file)


def test_a_wrappers_own_file_is_used_however_the_file_is_opened():
    backend = ShiftedBackend(MemoryBackend())
    created = backend.create("/file", 3)
    created.write_bytes(b"abc", 0)
    into = backend.allocate(2)
    for file in (created, backend.open("/file")):
        into.memoryview()[:] = b"--"
        file.read(into, 0).result()
        assert bytes(into.memoryview()) == b"bc"


def test_a_memory_backend_counts_a_removed_file_until_it_is_closed():
    backend = MemoryBackend(capacity_bytes=100)
    file = backend.create("/file", 60)
    backend.remove("/file")
    assert backend.free_bytes("/") == 40
    file.close()
    assert backend.free_bytes("/") == 100
    backend.create("/a", 60).close()
    backend.create("/b", 40).close()
    assert backend.free_bytes("/") == 0
    backend.rename("/a", "/b")
    assert backend.free_bytes("/") == 40
    assert backend.reopened().free_bytes("/") == 40


def test_a_memory_backend_wants_absolute_paths():
    with pytest.raises(ValueError, match="relative"):
        MemoryBackend().stat("file")
