"""The device that is not there: its work happens as late as is allowed, or, if asked, at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import gds.backends.kvikio
import offload.device.boundary
import offload.device.compute
import offload.update.device_step
import offload.update.pool
from gds.backends.kvikio_file import Used
from gds.probe import direct_io
from tests.device.fixtures import *  # noqa: F403
from tests.device.host import HostDigests, HostKernels
from tests.fake_gpu import device as fake_device
from tests.fake_gpu.compute import FakeCompute
from tests.fake_gpu.machine import FakeGpu, installed


@pytest.fixture
def device(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[fake_device.FakeDevice]:
    made = fake_device.FakeDevice(late=getattr(request, "param", True))
    fake_device.use(made)
    monkeypatch.setitem(offload.device.boundary.BOUNDARIES, "meta", lambda _: made)
    monkeypatch.setattr(offload.device.boundary, "_made", {})
    monkeypatch.setattr(offload.update.pool, "default_num_threads", lambda: 2)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield made
    torch.set_num_threads(before)
    made.forget()


@pytest.fixture
def compute(
    device: fake_device.FakeDevice,
    kernels: HostKernels,
    digests: HostDigests,
    monkeypatch: pytest.MonkeyPatch,
) -> FakeCompute:
    """What computes on `device`."""
    made = FakeCompute(device, kernels, digests)
    monkeypatch.setitem(offload.device.compute.COMPUTES, "meta", lambda _: made)
    monkeypatch.setattr(offload.device.compute, "_made", {})
    monkeypatch.setattr(offload.update.device_step, "step_by_torch", made.step_by_torch)
    return made


@pytest.fixture
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """The libraries at the boundary of a GPU: copies through host memory, or `gds`."""
    path = getattr(request, "param", "bounce")
    used = Used(path, "" if path == "gds" else "there is no nvidia-fs")
    monkeypatch.setattr(gds.backends.kvikio, "_examined", lambda _: {"read": used, "write": used})
    with installed(monkeypatch) as fake:
        fake.gds = path == "gds"
        yield fake


@pytest.fixture
def directory(tmp_path) -> str:
    """A folder for a store, on a drive."""
    if not (found := direct_io(str(tmp_path))).supported:
        pytest.skip(f"no direct I/O in {tmp_path}: {found.reason}")
    return str(tmp_path / "store")
