"""Blocks are streamed to a device: copies are ordered with what the device computes by events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from tests.blocks.models import HYPER
from tests.fake_gpu.device import FakeDevice, on_device, upload, values
from tests.numerics.reference import Reference, assert_same_bits

WIDTH, LAYERS = 16, 6


class Block(torch.nn.Module):
    """A layer with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(WIDTH, WIDTH)
        self.scale = torch.nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self.inner(x) * self.scale).relu()


class Model(torch.nn.Module):
    """Blocks, and a layer before them."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first = torch.nn.Linear(WIDTH, WIDTH)
            self.blocks = torch.nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Both:
    """The model in host memory, and on the device with streamed blocks."""

    def __init__(self, directory: Path, parameters: Any = "host") -> None:
        self.plain = Model()
        self.streamed = on_device(Model())
        self.reference = Reference(torch.optim.AdamW, self.plain.parameters(), **HYPER)
        self.optimizer = offload.AdamW(
            self.streamed.parameters(),
            directory=directory,
            model=self.streamed,
            options=offload.Options(parameters=parameters, chunk_bytes=4096),
            **HYPER,
        )

    def train(self, seed: int) -> None:
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed))
        loss = self.plain(x)
        loss.backward()
        found = self.streamed(upload(x))
        found.backward()
        assert_same_bits(values(found), loss.detach(), "the loss")

    def step(self) -> None:
        self._compare(lambda parameter: parameter.grad)
        self.reference.step()
        self.optimizer.step()
        for model in (self.plain, self.streamed):
            model.zero_grad()
        self._compare(lambda parameter: parameter)

    def _compare(self, what: Any) -> None:
        wanted = dict(self.plain.named_parameters())
        for name, parameter in self.streamed.named_parameters():
            assert_same_bits(values(what(parameter)), what(wanted[name]).detach(), name)


@pytest.mark.parametrize("parameters", ["host", "drive"])
@pytest.mark.parametrize("device", [True, False], ids=["late", "at once"], indirect=True)
def test_training_has_the_bits_of_host_memory(
    tmp_path: Path, device: FakeDevice, parameters: str
) -> None:
    both = Both(tmp_path / "run", parameters)
    for step in range(3):
        both.train(2 * step)
        both.train(2 * step + 1)
        both.step()
        for model in (both.plain, both.streamed):
            with torch.no_grad():
                model.blocks[step].scale.mul_(1.5)
    path = both.optimizer.checkpoint().result().path
    both.train(9)
    both.optimizer.restore()
    both.plain.zero_grad()
    both.streamed.zero_grad()
    both.train(10)
    both.step()
    assert len(device.locked) >= (LAYERS if parameters == "host" else 5), "what is sent is locked"
    with offload.open_checkpoint(path) as checkpoint:
        assert checkpoint.step == 3
    both.optimizer.close()
    if parameters == "host":
        both._compare(lambda parameter: parameter)


def test_few_buffers_are_on_the_device(tmp_path: Path, device: FakeDevice) -> None:
    both = Both(tmp_path / "run")
    sent = device.num_sent
    both.streamed(upload(torch.ones(2, WIDTH))).backward()
    stats = both.optimizer.stats()
    assert stats.block_buffers == 3
    assert device.num_sent - sent == stats.block_bytes
    assert stats.block_loads == LAYERS + LAYERS - 3
    both.optimizer.close()


def test_blocks_stay_streamed_if_the_device_has_no_room_for_all(
    tmp_path: Path, device: FakeDevice
) -> None:
    both = Both(tmp_path / "run")
    both.train(0)
    both.step()
    device.is_full = True
    with pytest.warns(RuntimeWarning, match="are streamed still"):
        both.optimizer.close()
    both.train(1)
    both._compare(lambda parameter: parameter.grad)
    both._compare(lambda parameter: parameter)
