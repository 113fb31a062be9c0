"""A device for every test, once with copies made at once and once with copies made late."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import offload.device.boundary
import offload.device.compute
import offload.update.device_check
import offload.update.pool
from tests.device.fixtures import *  # noqa: F403
from tests.device.host import HostDigests, HostKernels
from tests.fake_gpu import device as fake_device
from tests.fake_gpu.compute import FakeCompute


@pytest.fixture(params=[False, True], ids=["at-once", "late"])
def device(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[fake_device.FakeDevice]:
    made = fake_device.FakeDevice(late=request.param)
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
    monkeypatch.setattr(offload.update.device_check, "step_by_torch", made.step_by_torch)
    return made
