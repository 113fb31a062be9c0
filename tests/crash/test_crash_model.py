"""The disk that the crash tests use really loses what it may lose, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.crash.crash_backend import PAGE_BYTES, SECTOR_BYTES, CrashBackend, Disk, Image

NUM_CUTS = 400
NUM_PAGES = 4
Bytes = dict[str, bytes]


def outcomes(prepare: Callable[[CrashBackend], None]) -> list[Image]:
    """Return what many losses of power at the end of a run have left."""
    backend = CrashBackend()
    prepare(backend)
    disk = Disk(backend.log)
    rng = random.Random(1)
    return [disk.power_cut(rng) for _ in range(NUM_CUTS)]


def durable_file(backend: CrashBackend) -> None:
    file = backend.create("/file", NUM_PAGES * PAGE_BYTES)
    file.write_bytes(b"a" * NUM_PAGES * PAGE_BYTES, 0)
    file.sync()
    file.close()
    backend.sync_dir("/")


def rewritten(backend: CrashBackend) -> None:
    durable_file(backend)
    file = backend.open("/file", writable=True)
    file.write_bytes(b"b" * NUM_PAGES * PAGE_BYTES, 0)
    file.close()


def parts(image: Image, unit: int) -> str:
    """Say for each unit of the file whether it is old, new or mixed."""
    data = dict(image.files)["/file"]
    cut = [data[start : start + unit] for start in range(0, len(data), unit)]
    return "".join(chr(part[0]) if len(set(part)) == 1 else "?" for part in cut)


def test_what_is_synced_stays() -> None:
    assert {dict(image.files)["/file"] for image in outcomes(durable_file)} == {
        b"a" * NUM_PAGES * PAGE_BYTES
    }


def test_pages_of_one_write_survive_in_any_subset() -> None:
    found = {parts(image, PAGE_BYTES) for image in outcomes(rewritten)}
    assert {f"{number:04b}".translate({48: "a", 49: "b"}) for number in range(16)} <= found


def test_pages_are_torn_at_sectors_and_nowhere_else() -> None:
    images = outcomes(rewritten)
    torn = [image for image in images if "?" in parts(image, PAGE_BYTES)]
    assert len(torn) > NUM_CUTS // 20
    assert all("?" not in parts(image, SECTOR_BYTES) for image in images)


def test_writes_are_lost_in_any_order() -> None:
    def two_files(backend: CrashBackend) -> None:
        for name in ("/first", "/second"):
            file = backend.create(name, PAGE_BYTES)
            file.sync()
            file.write_bytes(b"b" * PAGE_BYTES, 0)
            file.close()
        backend.sync_dir("/")

    found = {
        tuple(b"b" in dict(image.files)[name] for name in ("/first", "/second"))
        for image in outcomes(two_files)
    }
    assert found == {(False, False), (False, True), (True, False), (True, True)}


def test_a_new_file_has_any_length_until_it_is_synced() -> None:
    def reserved(backend: CrashBackend) -> None:
        backend.create("/file", NUM_PAGES * PAGE_BYTES).close()
        backend.sync_dir("/")

    lengths = {len(dict(image.files)["/file"]) for image in outcomes(reserved)}
    assert lengths == {n * PAGE_BYTES for n in range(NUM_PAGES + 1)}


@pytest.mark.parametrize("synced", [False, True], ids=["not-synced", "synced"])
def test_a_name_survives_a_rename_as_the_old_or_the_new_one(synced: bool) -> None:
    def renamed(backend: CrashBackend) -> None:
        durable_file(backend)
        backend.rename("/file", "/other")
        if synced:
            backend.sync_dir("/")

    names = {tuple(dict(image.files)) for image in outcomes(renamed)}
    assert names == ({("/other",)} if synced else {("/file",), ("/other",)})


def test_a_sync_of_a_file_does_nothing_for_its_name() -> None:
    def unnamed(backend: CrashBackend) -> None:
        file = backend.create("/file", PAGE_BYTES)
        file.sync()
        file.close()

    assert {tuple(dict(image.files)) for image in outcomes(unnamed)} == {(), ("/file",)}
