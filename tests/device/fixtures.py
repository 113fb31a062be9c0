"""The kernels, compiled once for the tests of a run: fixtures for the folders that use them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.device.host import HostDigests, HostKernels, compiled
from tests.device.torch_sources import TorchArithmetic

__all__ = ["digests", "kernels", "libraries", "torch_arithmetic"]


@pytest.fixture(scope="session")
def libraries(tmp_path_factory) -> Path:
    """Where compiled code is kept: the workers of a run share it."""
    return compiled(tmp_path_factory)


@pytest.fixture(scope="session")
def kernels(libraries) -> HostKernels:
    return HostKernels(libraries)


@pytest.fixture(scope="session")
def digests(libraries) -> HostDigests:
    return HostDigests(libraries)


@pytest.fixture(scope="session")
def torch_arithmetic(libraries) -> TorchArithmetic:
    return TorchArithmetic(libraries)
