"""Ranges of files that are cloned, on file systems that can and on one that cannot."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from gds import Backend, Buffer, PosixBackend
from gds.contract import CLONE_REACH_BYTES
from gds.testing import CloneContract
from tests.kernel import loop_devices
from tests.kernel.loop_devices import Mounted, mounted

CLONING: Final = ("xfs", "btrfs")
MIB: Final = 1 << 20
FILE_BYTES: Final = 5 * CLONE_REACH_BYTES + 8192
CLONED: Final = (2 * CLONE_REACH_BYTES + 4096, 2 * CLONE_REACH_BYTES)
"""Offset and length of the range: its ends are not those of a piece."""


@pytest.fixture(scope="class")
def mounted_for_class(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mounted]:
    if reason := loop_devices.why_not(request.cls.filesystem):
        pytest.skip(reason)
    with mounted(request.cls.filesystem, tmp_path_factory.mktemp("clones")) as found:
        yield found


class OnALoopDevice(CloneContract):
    filesystem: str

    @pytest.fixture
    def directory(self, mounted_for_class: Mounted) -> str:
        return tempfile.mkdtemp(dir=mounted_for_class.path)

    @pytest.fixture(params=[True, False], ids=["direct", "buffered"])
    def backend(self, request: pytest.FixtureRequest) -> Iterator[Backend]:
        backend = PosixBackend(direct=request.param)
        yield backend
        backend.close()

    def raw(self, backend: Backend, path: str) -> bytes:
        return Path(path).read_bytes()


class TestXfs(OnALoopDevice):
    filesystem = "xfs"
    clones = True


class TestBtrfs(OnALoopDevice):
    filesystem = "btrfs"
    clones = True


class TestExt4(OnALoopDevice):
    filesystem = "ext4"
    clones = False


@pytest.fixture(params=CLONING)
def drive(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Mounted]:
    if reason := loop_devices.why_not(request.param):
        pytest.skip(reason)
    with mounted(request.param, tmp_path, size_bytes=512 * MIB) as found:
        yield found


def random_bytes(backend: Backend, nbytes: int) -> Buffer:
    buffer = backend.allocate(nbytes)
    buffer.memoryview()[:] = os.urandom(nbytes)
    return buffer


def test_a_clone_gives_back_the_space_that_the_file_had_reserved(drive: Mounted) -> None:
    backend = PosixBackend()
    source, target = (backend.create(f"{drive.path}/{name}", FILE_BYTES) for name in "ab")
    source.write(random_bytes(backend, FILE_BYTES), 0).result()
    source.sync()
    os.sync()
    before = drive.free_bytes()
    assert target.clone(source, *CLONED)
    target.sync()
    os.sync()
    offset, nbytes = CLONED
    pieces = (offset + nbytes) // CLONE_REACH_BYTES - -(-offset // CLONE_REACH_BYTES)
    assert drive.free_bytes() - before >= pieces * CLONE_REACH_BYTES
    backend.close()


def test_far_from_a_clone_an_overwrite_needs_no_space(drive: Mounted) -> None:
    backend = PosixBackend()
    files = [backend.create(f"{drive.path}/{name}", FILE_BYTES) for name in "ab"]
    files[0].write(random_bytes(backend, FILE_BYTES), 0).result()
    offset, nbytes = CLONED
    assert files[1].clone(files[0], offset, nbytes)
    stop = offset + nbytes
    far = [(0, offset - CLONE_REACH_BYTES), (stop + CLONE_REACH_BYTES, FILE_BYTES)]
    for start, end in far:
        files[1].write(random_bytes(backend, end - start), start).result()
    for file in files:
        file.sync()
    os.sync()
    drive.fill()
    for file in files:
        for start, end in far:
            file.write(random_bytes(backend, end - start), start).result()
            file.write_bytes(b"header", start)
        file.sync()
    backend.close()


def test_a_clone_that_was_synced_is_there_after_a_loss_of_power(tmp_path: Path) -> None:
    if reason := loop_devices.why_not("xfs"):
        pytest.skip(reason)
    with mounted("xfs", tmp_path) as drive:
        backend = PosixBackend()
        source, target = (backend.create(f"{drive.path}/{name}", 64 * MIB) for name in "ab")
        written = random_bytes(backend, 64 * MIB)
        source.write(written, 0).result()
        backend.sync_dir(str(drive.path))
        target.clone(source, 4 * MIB, 32 * MIB)  # the source was never synced
        target.sync()
        drive.lose_power()
        backend.close()
        drive.mount_again()
        found = (drive.path / "b").read_bytes()
        assert found[4 * MIB : 36 * MIB] == bytes(written.memoryview()[4 * MIB : 36 * MIB])
