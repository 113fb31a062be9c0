"""Ranges of files that are cloned, on file systems that can and on one that cannot.

What slots gain by it, and keep when the disk is full or the power is lost, is shown by
`tests.kernel.test_frozen_parameters`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gds import Backend, PosixBackend
from gds.testing import CloneContract
from tests.kernel import loop_devices
from tests.kernel.loop_devices import Mounted, mounted


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
