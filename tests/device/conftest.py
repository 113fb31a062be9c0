"""The kernels, compiled once for the tests of a process."""

from __future__ import annotations

import pytest

from tests.device.host import HostDigests, HostKernels, compiler
from tests.device.torch_sources import TorchArithmetic


@pytest.fixture(scope="session")
def kernels(tmp_path_factory) -> HostKernels:
    compiler()
    return HostKernels(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(scope="session")
def digests(tmp_path_factory) -> HostDigests:
    compiler()
    return HostDigests(tmp_path_factory.mktemp("digests") / "host")


@pytest.fixture(scope="session")
def torch_arithmetic(tmp_path_factory) -> TorchArithmetic:
    compiler()
    return TorchArithmetic(tmp_path_factory.mktemp("torch") / "host")
