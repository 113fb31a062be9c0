"""Memory of directories: reserved, zeroed, not anonymous, and returned with its last user."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gds import ALIGNMENT, StorageError, probe
from gds.errors import RefusedError
from gds.memory_directories import map_memory, require_memory
from tests.mounts import mounted
from tests.process_memory import resident_bytes

MIB = 1 << 20
SIZE_BYTES = 24 * MIB


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "memory"
    path.mkdir()
    with mounted(path, "-t", "tmpfs", "-o", f"size={SIZE_BYTES}", "tmpfs"):
        yield path


def test_memory_is_that_of_the_directory_until_its_last_user_is_gone(tmpfs):
    place = require_memory(str(tmpfs))
    assert (place.filesystem, place.size_bytes) == ("tmpfs", SIZE_BYTES)
    anonymous, shared = resident_bytes("RssAnon"), resident_bytes("RssShmem")
    small = map_memory(place, ALIGNMENT + 1)
    assert small.nbytes == ALIGNMENT + 1
    assert place.free_bytes == SIZE_BYTES - 2 * mmap.PAGESIZE, "whole pages are taken"
    del small
    buffer = map_memory(place, 16 * MIB)
    assert place.free_bytes == SIZE_BYTES - 16 * MIB
    assert [*tmpfs.iterdir()] == []
    view = buffer.memoryview()
    assert not any(view)
    ctypes.memset(buffer.address, 0xA5, len(view))  # without a copy, which malloc might keep
    assert resident_bytes("RssShmem") - shared >= 16 * MIB
    assert resident_bytes("RssAnon") - anonymous < 4 * MIB
    part = buffer.slice(3 * ALIGNMENT, 5)
    assert part.address == buffer.address + 3 * ALIGNMENT
    assert (part.kind, bytes(part.memoryview())) == ("host", b"\xa5" * 5)
    del buffer, view
    assert place.free_bytes == SIZE_BYTES - 16 * MIB
    del part
    assert place.free_bytes == SIZE_BYTES


def test_a_directory_with_too_little_memory_gives_none(tmpfs):
    place = require_memory(str(tmpfs))
    with pytest.raises(StorageError, match=f"{SIZE_BYTES + MIB} bytes .* make room") as error:
        map_memory(place, SIZE_BYTES + MIB)
    assert (error.value.errno, error.value.filename) == (errno.ENOSPC, str(tmpfs))
    assert place.free_bytes == SIZE_BYTES
    assert [*tmpfs.iterdir()] == []


def test_what_is_no_directory_of_memory_is_refused(tmpfs, tmp_path):
    (tmpfs / "file").touch()
    with pytest.raises(RefusedError, match="is a file"):
        require_memory(str(tmpfs / "file"))
    with pytest.raises(FileNotFoundError, match="no such"):
        require_memory(str(tmpfs / "none"))
    filesystem = probe.mount_of(str(tmp_path)).filesystem
    if filesystem in probe.MEMORY_FILESYSTEMS:
        pytest.skip(f"{tmp_path} is on {filesystem}")
    with pytest.raises(RefusedError, match=f"is on {filesystem}, whose files are not memory"):
        require_memory(str(tmp_path))


@pytest.fixture
def hugetlbfs(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "huge"
    path.mkdir()
    with mounted(path, "-t", "hugetlbfs", "none"):
        yield path


def free_huge_bytes() -> int:
    """Return the memory of all huge pages of the default size that nobody has reserved."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free, reserved = int(fields["HugePages_Free"]), int(fields["HugePages_Rsvd"])
    return (free - reserved) * int(fields["Hugepagesize"].split()[0]) * 1024


def test_too_few_huge_pages_are_refused_with_the_setting_that_adds_some(hugetlbfs):
    place = require_memory(str(hugetlbfs))
    assert place.page_bytes == os.statvfs(hugetlbfs).f_bsize > mmap.PAGESIZE
    assert place.size_bytes is None
    with pytest.raises(StorageError, match=r"hugetlbfs cannot be reserved: .*vm\.nr_hugepages"):
        map_memory(place, free_huge_bytes() + place.page_bytes)
    assert [*hugetlbfs.iterdir()] == []


def test_memory_on_huge_pages_is_aligned_to_them(hugetlbfs):
    place = require_memory(str(hugetlbfs))
    before = free_huge_bytes()
    if before < place.page_bytes:
        pytest.skip("no huge page is free here (vm.nr_hugepages)")
    buffer = map_memory(place, ALIGNMENT)
    assert buffer.address % place.page_bytes == 0
    assert before - free_huge_bytes() == place.page_bytes
    del buffer
    assert free_huge_bytes() == before
