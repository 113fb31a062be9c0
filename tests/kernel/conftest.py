"""What these tests need of the machine; where it is missing they skip, and say what it is."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernel import loop_devices, tracing
from tests.kernel.trainee import Trainees
from tests.threads import one_thread

__all__ = ["one_thread"]  # a fixture: small tensors on many threads are slow


@pytest.fixture(scope="session")
def trainees() -> Iterator[Trainees]:
    server = Trainees()
    yield server
    server.close()


@pytest.fixture(scope="session")
def strace() -> None:
    if reason := tracing.why_not():
        pytest.skip(reason)


@pytest.fixture(scope="session")
def loops() -> None:
    if reason := loop_devices.why_not():
        pytest.skip(reason)


@pytest.fixture(scope="session")
def quick_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory on a real file system whose device is memory, where that can be had.

    These tests sync thousands of times, and what a drive makes of that is not what they are about.
    """
    if loop_devices.why_not() or not os.access("/dev/shm", os.W_OK):
        yield tmp_path_factory.mktemp("quick")
        return
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="offload-kernel-") as directory,
        loop_devices.mounted("ext4", Path(directory), size_bytes=1 << 30) as found,
    ):
        yield found.path


@pytest.fixture
def quick_path(quick_directory: Path) -> Iterator[Path]:
    """An empty directory there, which is removed afterwards."""
    with tempfile.TemporaryDirectory(dir=quick_directory) as directory:
        yield Path(directory)
