"""State that stays in the memory of a directory: the same bits, and the memory is returned."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import offload
from gds import MemoryBackend, StorageError, probe
from gds.errors import RefusedError
from tests.mounts import mounted
from tests.numerics.pairs import CASES, Cut, Pair

SIZE_BYTES = 4 << 20
MOST = 120_000
"""Bytes: of the 200 kB of Adam's state, a part."""


@pytest.fixture
def shm() -> Iterator[Path]:
    try:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
            yield Path(path)
    except OSError as error:
        pytest.skip(f"no writable /dev/shm: {error}")


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "memory"
    path.mkdir()
    with mounted(path, "-t", "tmpfs", "-o", f"size={SIZE_BYTES}", "tmpfs"):
        yield path


def free_bytes(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def pair_in(
    path: Path, most: int | str = MOST, directory: str | Path = "/store", **more: object
) -> Pair:
    settings = {"host_memory": offload.MemoryDirectory(path, most), **more}
    backend = MemoryBackend() if directory == "/store" else None
    return Pair(CASES["adamw"], Cut(8192, 2, settings=settings), backend, str(directory))


@pytest.mark.parametrize("most", [MOST, "1GiB"], ids=["a-part", "all"])
def test_results_are_those_of_state_on_storage(shm: Path, tmp_path: Path, most: int | str) -> None:
    """The store is on a real drive, so that direct transfers use the memory of the directory."""
    pair = pair_in(shm, most, tmp_path / "run")
    pair.steps(4)
    pair.assert_same_state()
    pair.steps(4, 7)
    stats = pair.optimizer.stats()
    assert stats.resident_bytes > 0
    assert (stats.resident_bytes <= MOST) == (most == MOST)
    pair.assert_same_state()
    pair.reopen()
    pair.optimizer.restore()
    pair.steps(7, 10)
    pair.assert_same_state()
    pair.optimizer.close()
    assert [*shm.iterdir()] == []


@pytest.mark.parametrize("overlap", [None, "forward", "backward"])
def test_close_returns_the_memory(tmpfs: Path, overlap: str | None) -> None:
    pair = pair_in(tmpfs, overlap=overlap)
    before = free_bytes(tmpfs)
    for step in range(3):
        pair.step_live(step)
    pair.optimizer.checkpoint()
    resident = pair.optimizer.stats().resident_bytes
    assert before - free_bytes(tmpfs) == resident > 0
    pair.optimizer.close()
    assert free_bytes(tmpfs) == before
    assert pair.optimizer.stats().resident_bytes == resident


def test_a_full_directory_refuses_the_step_and_nothing_is_lost(tmpfs: Path) -> None:
    pair = pair_in(tmpfs)
    pair.steps(3)
    pair.assert_same_state()
    pair.reopen()
    pair.optimizer.restore()
    filler = tmpfs / "filler"
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free_bytes(tmpfs) - 4096)
    with pytest.raises(StorageError, match=r"host_memory= takes \d+ bytes .* make room") as error:
        pair.step_live(3)
    assert (error.value.errno, error.value.filename) == (errno.ENOSPC, str(tmpfs))
    assert "MemoryDirectory(" in str(error.value)
    filler.unlink()
    pair.steps(3, 6)
    pair.assert_same_state()
    pair.optimizer.close()


def refusal(host_memory: object) -> str:
    """Return the message with which an optimizer refuses a setting, and changes no file."""
    backend = MemoryBackend()
    with pytest.raises(RefusedError) as error:
        Pair(CASES["adamw"], Cut(8192, 2, settings={"host_memory": host_memory}), backend)
    assert backend.list_dir("/") == []
    return str(error.value)


def test_a_directory_on_a_drive_is_refused(tmp_path: Path) -> None:
    filesystem = probe.mount_of(str(tmp_path)).filesystem
    if filesystem in probe.MEMORY_FILESYSTEMS:
        pytest.skip(f"{tmp_path} is on {filesystem}")
    for named in (tmp_path, str(tmp_path), offload.MemoryDirectory(tmp_path, "1MiB")):
        assert f"is on {filesystem}, whose files are not memory" in refusal(named)


def test_directories_without_a_size_that_they_can_have_are_refused(
    tmpfs: Path, tmp_path: Path
) -> None:
    assert f"offload.MemoryDirectory('{tmpfs}', " in refusal(tmpfs)  # free space is a limit only
    too_much = offload.MemoryDirectory(tmpfs, SIZE_BYTES + 1)
    assert f"asks for {SIZE_BYTES + 1} bytes" in refusal(too_much)
    path = tmp_path / "huge"
    path.mkdir()
    with mounted(path, "-t", "hugetlbfs", "none"):
        assert "this hugetlbfs was mounted without a size" in refusal(path)


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="size of /dev/shm must be positive, got 0"):
        offload.MemoryDirectory("/dev/shm", 0)
    with pytest.raises(ValueError, match=r"size must be a number of bytes.*'much'"):
        offload.MemoryDirectory("/dev/shm", "much")
    with pytest.raises(ValueError, match="host_memory has no effect"):
        offload.Options(placement="device", host_memory="/mnt/cxl")
