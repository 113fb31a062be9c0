"""Every backend passes the same contract."""

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gds import (
    ALIGNMENT,
    Backend,
    Buffer,
    File,
    IOFuture,
    MemoryBackend,
    PosixBackend,
    WrapperBackend,
)
from gds.backends.wrapper import WrapperFile
from gds.probe import direct_io
from gds.testing import BackendContract

LIMIT_BYTES = 1 << 20


class PosixContract(BackendContract):
    direct: bool
    request_bytes: int | None = None

    @pytest.fixture
    def directory(self, tmp_path: Path) -> str:
        return str(tmp_path)

    @pytest.fixture
    def backend(self, directory: str) -> Iterator[Backend]:
        if self.direct and not (found := direct_io(directory)).supported:
            pytest.skip(f"no direct I/O in {directory}: {found.reason}")
        backend = PosixBackend(direct=self.direct, request_bytes=self.request_bytes)
        yield backend
        backend.close()

    def reopened(self, backend: Backend) -> Backend:
        return PosixBackend(direct=self.direct, request_bytes=self.request_bytes)

    def raw(self, backend: Backend, path: str) -> bytes:
        return Path(path).read_bytes()

    def make_symlink(self, target: str, path: str) -> None:
        Path(path).symlink_to(target)

    def make_hard_link(self, backend: Backend, target: str, path: str) -> None:
        Path(path).hardlink_to(target)

    @contextlib.contextmanager
    def limit(self, backend: Backend) -> Iterator[int]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, hard))
        try:
            yield LIMIT_BYTES
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class TestPosixDirect(PosixContract):
    direct = True


class TestPosixBuffered(PosixContract):
    direct = False


class TestPosixDirectInParts(PosixContract):
    direct = True
    request_bytes = 2 * ALIGNMENT


class TestPosixBufferedInParts(PosixContract):
    direct = False
    request_bytes = ALIGNMENT


class TestMemory(BackendContract):
    clones: bool | None = False

    @pytest.fixture
    def directory(self) -> str:
        return "/some/where"

    @pytest.fixture
    def backend(self, directory: str) -> Iterator[Backend]:
        backend = MemoryBackend(directories=[directory], capacity_bytes=32 * LIMIT_BYTES)
        yield backend
        backend.close()

    def reopened(self, backend: Backend) -> Backend:
        assert isinstance(backend, MemoryBackend)
        return backend.reopened()

    def raw(self, backend: Backend, path: str) -> bytes:
        assert isinstance(backend, MemoryBackend)
        node: Any = backend._root
        for part in path.strip("/").split("/"):
            node = node.entries[part]
        return bytes(node.data)

    def make_hard_link(self, backend: Backend, target: str, path: str) -> None:
        assert isinstance(backend, MemoryBackend)
        backend.link(target, path)

    @contextlib.contextmanager
    def limit(self, backend: Backend) -> Iterator[int]:
        yield 32 * LIMIT_BYTES


class TestMemoryThatClones(TestMemory):
    clones = True

    @pytest.fixture
    def backend(self, directory: str) -> Iterator[Backend]:
        capacity = 32 * LIMIT_BYTES
        backend = MemoryBackend(directories=[directory], capacity_bytes=capacity, clones=True)
        yield backend
        backend.close()


class TestWrapperOverMemory(TestMemory):
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

    def raw(self, backend: Backend, path: str) -> bytes:
        assert isinstance(backend, WrapperBackend)
        return super().raw(backend.inner, path)

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
