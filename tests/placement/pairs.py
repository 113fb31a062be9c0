"""Models on the device that is not there, each beside the same one in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import offload
from gds import Backend, MemoryBackend
from tests.device.torch_sources import TorchArithmetic
from tests.fake_gpu.backend import DeviceBackend
from tests.fake_gpu.device import FakeDevice, OnDevice, on_device, upload, values
from tests.numerics.models import Mixed, clip, give_gradients
from tests.numerics.pairs import MAX_NORM, Case, Cut, Pair
from tests.numerics.reference import Reference, assert_same_bits

STEPS = (0, 1, 7, 8)
"""Some parameters have no gradient in two of them, and some get their first in the third."""

ON_DEVICE = {"placement": "device"}
FORMATS = [{"master": "split"}, {"state_dtype": "bfloat16"}, {"state_dtype": "int8"}]


def give_device_gradients(step: int, model: torch.nn.Module) -> torch.Tensor:
    """Give a model on the device the gradients that one in host memory would get, clipped."""
    twin = Mixed()
    give_gradients(step, twin)
    norm = clip(twin, MAX_NORM)
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        on = isinstance(parameter, OnDevice)
        parameter.grad = upload(other.grad) if on and other.grad is not None else other.grad
    return norm


class DevicePair(Pair):
    """A model on the device whose state is on storage, beside one in host memory."""

    def step_live(self, step: int) -> torch.Tensor:
        norm = give_device_gradients(step, self.live)
        self.optimizer.step()
        return norm

    def assert_same_parameters(self) -> None:
        expected = dict(self.expected.named_parameters())
        for name, parameter in self.live.named_parameters():
            assert_same_bits(values(parameter), expected[name].detach(), name)


def host_pair(case: Case, cut: Cut) -> DevicePair:
    """Return a pair whose state is updated in host memory."""
    return DevicePair(case, cut, MemoryBackend(), live=on_device(Mixed()))


def device_pair(
    case: Case,
    cut: Cut,
    device: FakeDevice,
    arithmetic: TorchArithmetic | None = None,
    backend: Backend | None = None,
) -> DevicePair:
    """Return a pair whose state is updated on the device.

    Args:
        case: The optimizer and its groups.
        cut: How element space is cut.
        device: The device.
        arithmetic: Torch's arithmetic of a device, for the oracle; None where it is the CPU's.
        backend: Another one than memory.
    """
    reference: type[Reference] = Reference
    if arithmetic is not None:

        class OnCuda(Reference):
            def _step_inner(self) -> None:
                with arithmetic.foreach():
                    self.inner.step()

        reference = OnCuda
        case = Case(case.optimizer, {**case.hyper, "foreach": True}, case.groups)
    cut = Cut(cut.chunk_bytes, cut.ring_chunks, settings={**cut.settings, **ON_DEVICE})
    backend = backend or DeviceBackend(MemoryBackend(), device)
    return DevicePair(case, cut, backend, live=on_device(Mixed()), reference=reference)


def train(pair: Pair, steps: Sequence[int] = STEPS) -> None:
    """Take steps on both sides, and compare the parameters after each."""
    for step in steps:
        pair.step(step)
        pair.assert_same_parameters()


def checkpoint_files(optimizer: offload.OffloadedOptimizer, backend: Any) -> dict[str, bytes]:
    """Return the files of a new checkpoint but that which names the store."""
    path = optimizer.checkpoint().result().path
    found = {}
    for name in backend.list_dir(path):
        if name.endswith("safetensors") and name != "train_state.safetensors":
            file = backend.open(f"{path}/{name}")
            found[name] = file.read_bytes(0, file.size_bytes)
            file.close()
    return found


class Network(torch.nn.Module):
    """A model with real gradients and a buffer that its forward changes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(16, 64),
            torch.nn.Tanh(),
            torch.nn.Linear(64, 64),
            torch.nn.Linear(64, 4),
        )
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.seen += 1
        return self.layers(batch)
