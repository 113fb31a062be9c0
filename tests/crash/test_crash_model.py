"""The disk that the crash tests use really loses what it may lose, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.crash.crash_backend import PAGE_BYTES, SECTOR_BYTES, CrashBackend, Disk

NUM_CUTS = 400
NUM_PAGES = 4
OLD, NEW = b"a" * NUM_PAGES * PAGE_BYTES, b"b" * NUM_PAGES * PAGE_BYTES
Files = dict[str, bytes]


def outcomes(prepare: Callable[[CrashBackend], None]) -> list[Files]:
    """Return the files that many losses of power at the end of a run have left."""
    backend = CrashBackend()
    prepare(backend)
    disk = Disk(backend.log)
    rng = random.Random(1)
    return [dict(disk.power_cut(rng).files) for _ in range(NUM_CUTS)]


def durable(backend: CrashBackend) -> None:
    with backend.create("/file", len(OLD)) as file:
        file.write_bytes(OLD, 0)
        file.sync()
    backend.sync_dir("/")


def rewritten(backend: CrashBackend) -> None:
    durable(backend)
    with backend.open("/file", writable=True) as file:
        file.write_bytes(NEW, 0)


def renamed(backend: CrashBackend) -> None:
    durable(backend)
    backend.rename("/file", "/other")


def renamed_and_synced(backend: CrashBackend) -> None:
    renamed(backend)
    backend.sync_dir("/")


def nameless(backend: CrashBackend) -> None:
    with backend.create("/file", PAGE_BYTES) as file:
        file.sync()


def reserved(backend: CrashBackend) -> None:
    backend.create("/file", len(OLD)).close()
    backend.sync_dir("/")


def content(files: Files, unit: int = PAGE_BYTES) -> str:
    """Say for each unit of the file whether it is old, new or mixed."""
    data = files["/file"]
    cut = [data[start : start + unit] for start in range(0, len(data), unit)]
    return "".join(chr(part[0]) if len(set(part)) == 1 else "?" for part in cut)


@pytest.mark.parametrize(
    ("prepare", "names"),
    [
        (durable, {("/file",)}),
        (renamed, {("/file",), ("/other",)}),
        (renamed_and_synced, {("/other",)}),
        (nameless, {(), ("/file",)}),
    ],
)
def test_a_name_is_lost_until_its_directory_is_synced(
    prepare: Callable[[CrashBackend], None], names: set[tuple[str, ...]]
) -> None:
    assert {tuple(files) for files in outcomes(prepare)} == names


def test_pages_are_lost_in_any_subset_and_torn_at_sectors_until_the_file_is_synced() -> None:
    assert {files["/file"] for files in outcomes(durable)} == {OLD}
    found = outcomes(rewritten)
    subsets = {f"{number:04b}".translate({48: "a", 49: "b"}) for number in range(16)}
    assert subsets <= {content(files) for files in found}
    assert sum("?" in content(files) for files in found) > NUM_CUTS // 20
    assert all("?" not in content(files, SECTOR_BYTES) for files in found)
    lengths = {len(files["/file"]) for files in outcomes(reserved)}
    assert lengths == {n * PAGE_BYTES for n in range(NUM_PAGES + 1)}
