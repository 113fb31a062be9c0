"""A device for every test, once with copies made at once and once with copies made late."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import offload.device
import offload.update_pool
from tests.placement import fake_device


@pytest.fixture(params=[False, True], ids=["at-once", "late"])
def device(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[fake_device.FakeDevice]:
    made = fake_device.FakeDevice(late=request.param)
    fake_device.use(made)
    monkeypatch.setitem(offload.device.BOUNDARIES, "meta", lambda _: made)
    monkeypatch.setattr(offload.device, "_made", {})
    monkeypatch.setattr(offload.update_pool, "default_num_threads", lambda: 2)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield made
    torch.set_num_threads(before)
