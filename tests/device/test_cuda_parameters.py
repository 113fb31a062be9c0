"""Parameters on a real CUDA device, stepped on the CPU: the bits are those of host memory."""

from __future__ import annotations

import itertools

import pytest
import torch

import offload
from gds import MemoryBackend
from tests.numerics.models import Mixed, clip, give_gradients
from tests.numerics.pairs import CASES, MAX_NORM, Cut, Pair
from tests.numerics.reference import assert_same_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

BUSY = 4096
"""Edge of the matrices that keep the device at work, so that what is not ordered shows."""


def keep_busy() -> None:
    """Queue tens of milliseconds of work on the current stream."""
    matrix = torch.randn(BUSY, BUSY, device="cuda")
    for _ in range(10):
        matrix = (matrix @ matrix).tanh()


class CudaPair(Pair):
    """A model on the device, beside one in host memory. Gradients arrive late."""

    def step_live(self, step: int) -> torch.Tensor:
        twin = Mixed()
        give_gradients(step, twin)
        norm = clip(twin, MAX_NORM)
        keep_busy()
        for mine, other in zip(self.live.parameters(), twin.parameters(), strict=True):
            mine.grad = (
                None if other.grad is None else other.grad.pin_memory().cuda(non_blocking=True)
            )
        self.optimizer.step()
        return norm

    def assert_same_parameters(self) -> None:
        expected = dict(self.expected.named_parameters())
        keep_busy()
        for name, parameter in self.live.named_parameters():
            assert_same_bits(parameter.detach().cpu(), expected[name].detach(), name)


@pytest.mark.parametrize("cut", [Cut(4096, 2), Cut(20480, 3), Cut(1 << 20, 2)], ids=str)
@pytest.mark.parametrize("name", ["adamw", "sgd-momentum-in-some-groups", "rprop"])
def test_parameters_and_state_equal_those_of_state_in_memory(name, cut):
    pair = CudaPair(CASES[name], cut, MemoryBackend(), live=Mixed().cuda())
    for step in range(9):
        pair.step(step)
        pair.assert_same_parameters()
    pair.assert_same_state()
    pair.reopen(live=Mixed(seed=99).cuda())
    pair.optimizer.restore()
    pair.assert_same_parameters()
    for step in range(9, 12):
        pair.step(step)
        pair.assert_same_parameters()
    pair.assert_same_state()
    pair.optimizer.close()


def test_the_training_stream_may_be_any():
    side = torch.cuda.Stream()
    pair = CudaPair(CASES["adamw"], Cut(4096, 2), MemoryBackend(), live=Mixed().cuda())
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for step in range(6):
            pair.step(step)
            pair.assert_same_parameters()
        pair.assert_same_state()


class Network(torch.nn.Module):
    def __init__(self, width: int = 512) -> None:
        super().__init__()
        torch.manual_seed(3)
        sizes = [width] * 6
        self.layers = torch.nn.Sequential(
            *(torch.nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        )

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layers(batch)


@pytest.mark.parametrize("overlap", ["forward", "backward"])
def test_an_overlapping_step_gives_the_bits_of_one_that_waits(overlap):
    finals = []
    for mode in (None, overlap):
        model = Network().cuda()
        options = Cut(64 << 10, 2, settings={"overlap": mode}).options(MemoryBackend())
        optimizer = offload.AdamW(
            model.parameters(), lr=1e-3, model=model, directory="/store", options=options
        )
        generator = torch.Generator().manual_seed(7)
        for step in range(8):
            batch = torch.randn(64, 512, generator=generator).cuda()
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            if step == 5:
                optimizer.checkpoint()
        optimizer.synchronize()
        finals.append([p.detach().cpu() for p in model.parameters()])
        optimizer.close()
    for found, expected in zip(finals[1], finals[0], strict=True):
        assert_same_bits(found, expected, "parameter")


def test_a_graph_that_is_captured_after_synchronize_trains_as_without_it():
    finals = []
    for captured in (False, True):
        model = Network().cuda()
        options = Cut(64 << 10, 2).options(MemoryBackend())
        optimizer = offload.AdamW(
            model.parameters(), lr=1e-3, model=model, directory="/store", options=options
        )
        generator = torch.Generator().manual_seed(7)
        batch = torch.zeros(64, 512, device="cuda")
        graph = torch.cuda.CUDAGraph()
        for step in range(8):
            batch.copy_(torch.randn(64, 512, generator=generator))
            if captured and step == 4:
                optimizer.zero_grad(set_to_none=True)  # gradients get the graph's own memory
                optimizer.synchronize()
                with torch.cuda.graph(graph):
                    model(batch).square().mean().backward()
            if captured and step >= 4:
                graph.replay()
            else:
                optimizer.zero_grad(set_to_none=True)
                model(batch).square().mean().backward()
            optimizer.step()
        optimizer.synchronize()
        finals.append([p.detach().cpu() for p in model.parameters()])
        optimizer.close()
    for found, expected in zip(finals[1], finals[0], strict=True):
        # A captured matrix product may be another kernel than one that is launched.
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_only_parameters_and_gradients_cross():
    model = Network().cuda().bfloat16()
    options = Cut(64 << 10, 2).options(MemoryBackend())
    with offload.AdamW(
        model.parameters(), model=model, directory="/s", options=options
    ) as optimizer:
        nbytes = sum(p.nbytes for p in model.parameters())
        for _ in range(2):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            before = optimizer.stats()
            optimizer.step()
        after = optimizer.stats()
        assert after.to_host_bytes - before.to_host_bytes == 2 * nbytes
        assert after.to_device_bytes - before.to_device_bytes == nbytes
        optimizer.checkpoint().result()
        assert optimizer.stats().to_host_bytes - after.to_host_bytes == nbytes
