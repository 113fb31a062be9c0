"""The disk that the crash tests use really loses what it may lose, and nothing else."""

from __future__ import annotations

import random

from tests.crash.crash_backend import PAGE_BYTES, SECTOR_BYTES, CrashBackend, Disk

NUM_CUTS = 400
NUM_PAGES = 4
OLD, NEW = b"a" * NUM_PAGES * PAGE_BYTES, b"b" * NUM_PAGES * PAGE_BYTES


def left_by(backend: CrashBackend) -> list[dict[str, bytes]]:
    """Return the files that many losses of power have left, at the present end of a run."""
    disk, rng = Disk(backend.log), random.Random(1)
    return [dict(disk.power_cut(rng).files) for _ in range(NUM_CUTS)]


def durable() -> CrashBackend:
    backend = CrashBackend()
    with backend.create("/file", len(OLD)) as file:
        file.write_bytes(OLD, 0)
        file.sync()
    assert {tuple(files) for files in left_by(backend)} == {(), ("/file",)}
    backend.sync_dir("/")
    assert all(files == {"/file": OLD} for files in left_by(backend))
    return backend


def test_a_name_is_lost_until_its_directory_is_synced() -> None:
    backend = durable()
    backend.rename("/file", "/other")
    assert {tuple(files) for files in left_by(backend)} == {("/file",), ("/other",)}
    backend.sync_dir("/")
    assert {tuple(files) for files in left_by(backend)} == {("/other",)}


def test_a_file_moved_between_directories_is_in_one_in_both_or_in_none_until_they_are_synced() -> (
    None
):
    backend = durable()
    backend.make_dir("/folder")
    backend.sync_dir("/")
    backend.rename("/file", "/folder/file")
    one, other = "/file", "/folder/file"
    assert {tuple(files) for files in left_by(backend)} == {(), (one,), (other,), (one, other)}
    backend.sync_dir("/folder")
    backend.sync_dir("/")
    assert all(files == {other: OLD} for files in left_by(backend))


def test_pages_are_lost_in_any_subset_and_torn_at_sectors_until_the_file_is_synced() -> None:
    backend = durable()
    with backend.open("/file", writable=True) as file:
        file.write_bytes(NEW, 0)
    found = [files["/file"] for files in left_by(backend)]

    def units(data: bytes, size: int) -> str:
        """Say for each unit of the file whether it is old, new or mixed."""
        cut = [data[start : start + size] for start in range(0, len(data), size)]
        return "".join(chr(part[0]) if len(set(part)) == 1 else "?" for part in cut)

    subsets = {f"{number:04b}".translate({48: "a", 49: "b"}) for number in range(16)}
    assert subsets <= {units(data, PAGE_BYTES) for data in found}
    assert any("?" in units(data, PAGE_BYTES) for data in found)
    assert all("?" not in units(data, SECTOR_BYTES) for data in found)


def test_a_file_may_have_any_length_until_it_is_synced() -> None:
    backend = CrashBackend()
    backend.create("/file", len(OLD)).close()
    backend.sync_dir("/")
    lengths = {len(files["/file"]) for files in left_by(backend)}
    assert lengths == {n * PAGE_BYTES for n in range(NUM_PAGES + 1)}
