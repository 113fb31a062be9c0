"""Training on a real CUDA device: the bits of state in memory, of torch's optimizer there."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from gds import MemoryBackend
from offload.errors import DamagedError
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


# State beside the drive, stepped on the CPU.


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("adamw", Cut(4096, 2)),
        ("sgd-momentum-in-some-groups", Cut(20480, 3)),
        ("rprop", Cut(1 << 20, 2)),
    ],
    ids=str,
)
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


def trained(overlap: str | None = None, *, captured: bool = False) -> list[torch.Tensor]:
    """Return the parameters after eight steps; the last four are of a captured graph, if asked."""
    model = Network().cuda()
    options = Cut(64 << 10, 2, settings={"overlap": overlap}).options(MemoryBackend())
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
        if step == 5:
            optimizer.checkpoint()
    optimizer.synchronize()
    optimizer.close()
    return [p.detach().cpu() for p in model.parameters()]


@pytest.mark.parametrize("overlap", ["forward", "backward"])
def test_an_overlapping_step_gives_the_bits_of_one_that_waits(overlap):
    for found, expected in zip(trained(overlap), trained(), strict=True):
        assert_same_bits(found, expected, "parameter")


def test_a_graph_that_is_captured_after_synchronize_trains_as_without_it():
    for found, expected in zip(trained(captured=True), trained(), strict=True):
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


# State in the memory of the device.

WIDTH = 384
CHUNK = {"chunk_bytes": 128 << 10, "ring_chunks": 3, "allow_volatile": True}


@pytest.fixture
def cupy() -> None:
    pytest.importorskip("cupy")


class Masters:
    """torch's optimizer on FP32 masters in device memory, and 16-bit parameters beside them."""

    def __init__(self, optimizer_class: Any, model: torch.nn.Module, hyper: Mapping[str, Any]):
        self.live = list(model.parameters())
        self.masters = [p.detach().float().clone().requires_grad_() for p in self.live]
        self.inner = optimizer_class(self.masters, **hyper)

    def step(self) -> None:
        for live, master in zip(self.live, self.masters, strict=True):
            assert live.grad is not None
            master.grad = live.grad.float()
        self.inner.step()
        with torch.no_grad():
            for live, master in zip(self.live, self.masters, strict=True):
                live.copy_(master)


def network() -> Network:
    return Network(WIDTH).bfloat16().cuda()


def give(step: int, *given: torch.nn.Module) -> None:
    for model in given:
        keep_busy()
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.grad = gradient.pin_memory().cuda(non_blocking=True)


def streamed(
    model: torch.nn.Module, directory: Path, settings: Mapping[str, Any]
) -> offload.OffloadedOptimizer:
    options = offload.Options(**settings)
    return offload.AdamW(model.parameters(), model=model, directory=directory, options=options)


def assert_same(one: torch.nn.Module, other: torch.nn.Module, what: str) -> None:
    for (name, found), expected in zip(one.named_parameters(), other.parameters(), strict=True):
        assert_same_bits(found.detach().cpu(), expected.detach().cpu(), f"{name}, {what}")


def assert_close(one: torch.nn.Module, other: torch.nn.Module, what: str) -> None:
    """Check that parameters are within a unit in the last place of bf16, or 1e-5 of a step."""
    for (name, found), expected in zip(one.named_parameters(), other.parameters(), strict=True):
        numbers = [p.detach().cpu().float() for p in (found, expected)]
        unit = 2.0 ** (torch.frexp(numbers[1]).exponent.float() - 8)
        # Near zero the unit is far below what FP32 makes of a step of 1e-3.
        assert ((numbers[0] - numbers[1]).abs() <= unit + 1e-8).all(), f"{name}, {what}"


@pytest.mark.parametrize(
    ("optimizer_class", "hyper"),
    [
        (torch.optim.AdamW, {"weight_decay": 0.1}),
        (torch.optim.AdamW, {"amsgrad": True, "maximize": True}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.Adam, {"weight_decay": 0.05}),
        (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
        (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
        (torch.optim.AdamW, {"foreach": False}),
        (torch.optim.NAdam, {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("device_memory", [0, "1MiB"])
def test_bits_are_those_of_torchs_optimizer_in_memory(
    optimizer_class, hyper, device_memory, tmp_path, cupy
):
    live, expected = network(), network()
    reference = Masters(optimizer_class, expected, hyper)
    options = offload.Options(placement="device", device_memory=device_memory, **CHUNK)
    with offload.OffloadedOptimizer(
        optimizer_class, live.parameters(), model=live, directory=tmp_path, options=options, **hyper
    ) as optimizer:
        for step in range(4):
            give(step, live, expected)
            optimizer.step()
            reference.step()
            before = optimizer.stats()
            # Of any version of torch: a kernel that rounds otherwise is not used, and if nothing
            # can take its place, the difference is said.
            if "although" in before.update_code:
                assert hyper.get("fused")
                assert_close(live, expected, f"after step {step}")
            else:
                assert_same(live, expected, f"after step {step}")
        optimizer.checkpoint().result()
        stats = optimizer.stats()
    parameter_bytes = sum(p.nbytes for p in live.parameters())
    assert (before.to_host_bytes, before.to_device_bytes) == (0, 0)
    assert (stats.to_host_bytes, stats.to_device_bytes) == (parameter_bytes, 0)


@pytest.mark.parametrize(
    ("settings", "overlap"),
    [
        ({}, "forward"),
        ({"master": "split"}, None),
        ({"state_dtype": "bfloat16"}, "forward"),
        ({"state_dtype": "int8"}, None),
    ],
    ids=["float32", "split", "bfloat16", "int8"],
)
def test_a_resume_is_bit_identical_to_not_having_stopped(settings, overlap, tmp_path, cupy):
    finals = []
    for stops in (False, True):
        directory = tmp_path / str(stops)
        live = network()
        settings = {**settings, **CHUNK, "placement": "device", "overlap": overlap}
        optimizer = streamed(live, directory, settings)
        for step in range(4):
            if step == 2 and stops:
                optimizer.checkpoint().result()
                optimizer.close()
                live = network()
                optimizer = streamed(live, directory, settings)
                assert optimizer.restore().step == 2
            give(step, live)
            optimizer.step()
        optimizer.synchronize()
        optimizer.close()
        finals.append(live)
    assert_same(finals[1], finals[0], "after a resume")


def test_a_flipped_bit_is_found_by_the_device(tmp_path, cupy):
    live = network()
    settings = {**CHUNK, "placement": "device"}
    optimizer = streamed(live, tmp_path, settings)
    give(0, live)
    optimizer.step()
    path = Path(optimizer.checkpoint().result().path) / "exp_avg.safetensors"
    optimizer.close()
    data = bytearray(path.read_bytes())
    data[-5000] ^= 4
    path.write_bytes(data)
    optimizer = streamed(live, tmp_path, settings)
    optimizer.restore()
    give(1, live)
    with pytest.raises(DamagedError, match="exp_avg"):
        optimizer.step()
    optimizer.close()


@pytest.mark.parametrize("kind", ["host", "drive"])
def test_gradients_that_leave_the_device_change_no_bit(kind, tmp_path):
    """Their memory is free again: the peak of a backward has a few of them, not all."""

    def model() -> torch.nn.Sequential:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(2048, 2048, bias=False) for _ in range(24)]
        return torch.nn.Sequential(*layers).to("cuda", torch.bfloat16)

    found, peaks = [], []
    for gradients in (None, kind):
        live = model()
        options = offload.Options(gradients=gradients, placement="host")
        with offload.AdamW(
            live.parameters(), directory=tmp_path / str(gradients), options=options
        ) as optimizer:
            for step in range(3):
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                for micro in range(2):
                    keep_busy()
                    seed = torch.Generator("cuda").manual_seed(2 * step + micro)
                    batch = torch.randn(8, 2048, device="cuda", generator=seed)
                    live(batch.bfloat16()).float().square().mean().backward()
                torch.nn.utils.clip_grad_value_(live.parameters(), 1e-3)
                peaks.append(torch.cuda.max_memory_allocated() - before)
                optimizer.step()
                optimizer.zero_grad()
            found.append([p.detach().cpu() for p in live.parameters()])
    for ours, torchs in zip(found[1], found[0], strict=True):
        assert_same_bits(ours, torchs, kind)
    assert max(peaks[3:]) <= min(peaks[:3])
