"""Directories and backends on a drive, and a kernel that does what a test tells it."""

import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gds import ALIGNMENT, Backend, Buffer, PosixBackend, libc, probe
from gds.kvikio import KvikioBackend, Used
from gds.testing import Harness
from gds.testing._harness import contents, filled
from tests.fake_gpu.machine import FakeGpu, installed

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


def drop_cache(path: str) -> None:
    """Make a file durable, and take all of it out of the page cache."""
    fd = os.open(path, os.O_RDWR)
    os.fsync(fd)

    def dropped() -> bool:
        # A page that the kernel is looking at just then, or is still reading ahead, is not dropped.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return not libc.cached_bytes(fd, os.fstat(fd).st_size)

    wait_for(dropped)
    os.close(fd)


def on_a_drive(path: Path) -> str:
    """Return a directory's path; the test is skipped if there is no direct I/O in it."""
    if not (found := probe.direct_io(str(path))).supported:
        pytest.skip(f"no direct I/O in {path}: {found.reason}")
    return str(path)


def random_source(backend: Backend, nbytes: int = 16 * ALIGNMENT) -> tuple[Buffer, bytes]:
    """Return a buffer of random bytes, and the bytes."""
    source = filled(backend, nbytes, nbytes)
    return source, contents(source)


class FilesOnADrive(Harness):
    """Hooks of the contract for a backend whose files are those of the system."""

    @pytest.fixture
    def directory(self, tmp_path: Path) -> str:
        return on_a_drive(tmp_path)

    def raw(self, backend: Backend, path: str) -> bytes:
        return Path(path).read_bytes()

    def make_symlink(self, target: str, path: str) -> None:
        Path(path).symlink_to(target)

    def make_hard_link(self, backend: Backend, target: str, path: str) -> None:
        Path(path).hardlink_to(target)


@pytest.fixture
def directory(tmp_path: Path) -> str:
    return on_a_drive(tmp_path)


@pytest.fixture
def residency(directory: str) -> None:
    """Skip a test where the kernel does not say what its page cache holds."""
    with open(f"{directory}/known", "wb+") as file:
        file.write(bytes(4096))
        file.flush()
        known = libc.cached_bytes(file.fileno(), 4096)
    os.unlink(f"{directory}/known")
    if known is None:
        pytest.skip("this kernel does not say what its page cache holds")


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


# A GPU made of host memory

GDS = {"read": Used("gds", ""), "write": Used("gds", "")}
NO_GDS = {"read": Used("bounce", "no nvidia-fs"), "write": Used("bounce", "no nvidia-fs")}

WAYS: dict[str, dict[str, str]] = {
    "gds": {"path": "gds"},
    "compat": {"path": "compat"},
    "bounce": {"path": "bounce"},
}

Make = Callable[..., KvikioBackend]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    with installed(monkeypatch) as fake:
        yield fake


@pytest.fixture
def make(gpu: FakeGpu) -> Iterator[Make]:
    """Make backends of the fake GPU, which are closed at the end."""
    made = []

    def make(**arguments: Any) -> KvikioBackend:
        arguments.setdefault("examine", lambda _: dict(GDS if gpu.gds else NO_GDS))
        gpu.compat_is_measured |= arguments.get("path") == "compat"
        made.append(KvikioBackend(**arguments))
        return made[-1]

    yield make
    for backend in made:
        backend.close()
    made.clear()
