"""Directories and backends for the posix tests, and a kernel that does what a test tells it."""

import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gds import PosixBackend, probe

Transfer = Callable[[int, list[memoryview], int], int]


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until something holds; what takes a minute will never be so."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def wait_for_release(condition: Callable[[], object]) -> None:
    """Wait until something holds that follows from nobody referring to something any more.

    A thread that has done a transfer lets go of it just after its result is there, and what is in
    a cycle goes when garbage is next collected.
    """
    wait_for(lambda: condition() or (gc.collect() and False) or condition())


def open_below(*directories: str) -> list[str]:
    """Return the paths at or below `directories` that this process has open."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # the one that listed them
        if any(path.startswith(directory) for directory in directories):
            found.append(path)
    return found


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
    try:
        path = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="gds-test-"))
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
