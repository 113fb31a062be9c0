"""Directories and backends for the posix tests, and a kernel that does what a test tells it."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gds import PosixBackend, probe

Transfer = Callable[[int, list[memoryview], int], int]


@pytest.fixture
def directory(tmp_path: Path) -> str:
    if not (found := probe.direct_io(str(tmp_path))).supported:
        pytest.skip(f"no direct I/O in {tmp_path}: {found.reason}")
    return str(tmp_path)


@pytest.fixture
def backend(directory: str) -> Iterator[PosixBackend]:
    backend = PosixBackend(direct=True)
    yield backend
    backend.close()


@pytest.fixture
def memory_directory() -> Iterator[str]:
    """A directory on a file system that accepts O_DIRECT and has no device."""
    path = Path(f"/dev/shm/gds-test-{os.getpid()}")
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"no writable /dev/shm: {error}")
    if probe.mount_of(str(path)).filesystem != "tmpfs":
        path.rmdir()
        pytest.skip("/dev/shm is not tmpfs")
    yield str(path)
    for file in path.iterdir():
        file.unlink()
    path.rmdir()


class Kernel:
    """Stands before `os.preadv` and `os.pwritev`: notes each call, and may change what it does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, bool, int, int]] = []
        """Function, whether the descriptor is direct, offset and length of each call."""
        self._monkeypatch = monkeypatch
        self._answer: Callable[..., int] | None = None

    def start(self, answer: Callable[..., int] | None = None) -> None:
        """Begin; `answer(name, real, fd, view, offset)` replaces the calls."""
        self._answer = answer
        for name in ("preadv", "pwritev"):
            self._monkeypatch.setattr(os, name, self._replacement(name, getattr(os, name)))

    def _replacement(self, name: str, real: Transfer) -> Transfer:
        def call(fd: int, views: list[memoryview], offset: int) -> int:
            (view,) = views
            self.calls.append((name, self.is_direct(fd), offset, len(view)))
            if self._answer is None:
                return real(fd, views, offset)
            return self._answer(name, real, fd, view, offset)

        return call

    @staticmethod
    def is_direct(fd: int) -> bool:
        """Say whether a descriptor was opened with O_DIRECT."""
        lines = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
        flags = next(line for line in lines if line.startswith("flags:"))
        return bool(int(flags.split()[1], 8) & os.O_DIRECT)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(monkeypatch)
