"""The kernels, compiled once for the tests of a process."""

from __future__ import annotations

import pytest

from tests.device.host import HostDigests, HostKernels, compiler


@pytest.fixture(scope="session")
def kernels(tmp_path_factory) -> HostKernels:
    compiler()
    return HostKernels(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(scope="session")
def digests(tmp_path_factory) -> HostDigests:
    compiler()
    return HostDigests(tmp_path_factory.mktemp("digests") / "host")
