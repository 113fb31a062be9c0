"""`bench.gpu_training` over the substitute for a device: what it compares, and what it notices."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gds.backends.kvikio
from bench import gpu_training
from bench._harness import Result
from gds import probe
from gds.backends.kvikio_file import Used
from tests.fake_gpu.device import on_device, upload
from tests.fake_gpu.machine import FakeGpu, installed

STEPS = 4


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        for name, dtype in (("small", torch.bfloat16), ("large", torch.float32)):
            values = torch.randn(3000, generator=generator).to(dtype)
            self.register_parameter(name, torch.nn.Parameter(values))


def backward(model: torch.nn.Module, step: int) -> float:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = upload(gradient.to(parameter.dtype))
    return float(step)


# torch's step of this class has the same bits on a CPU, which is where the substitute computes.
TASK = gpu_training.Task(
    make=lambda: on_device(Small()),
    backward=backward,
    optimizer_class=torch.optim.SGD,
    hyper={"lr": 0.01, "momentum": 0.9, "nesterov": True},
    chunk_bytes=4096,
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    used = Used("gds", "")
    monkeypatch.setattr(gds.backends.kvikio, "_examined", lambda _: {"read": used, "write": used})
    with installed(monkeypatch) as fake:
        fake.gds = True
        yield fake


def measured(tmp_path: Path) -> tuple[str, dict[str, Any]]:
    """Return what is wrong, and what is recorded."""
    if not probe.direct_io(str(tmp_path)).supported:
        pytest.skip("the temporary directory is not on a drive")
    directory = tmp_path / "scratch"
    directory.mkdir()
    arguments = ["--model", "tiny", "--steps", str(STEPS), "--output", str(tmp_path / "results")]
    args = gpu_training._arguments(arguments)
    result = Result("gpu_training", args, str(directory))
    wrong = gpu_training.measure(args, result, str(directory), TASK)
    return wrong, json.loads(result.write().read_text())


def test_all_runs_are_compared_in_every_step_and_go_on_half_way(tmp_path, gpu, device, compute):
    wrong, found = measured(tmp_path)
    assert wrong == ""
    samples, facts = found["samples"], found["facts"]
    for name in ("again", "device", "host"):
        assert samples[f"{name}_different"] == [0] * STEPS
    for name in ("torch", "again", "device", "host"):
        assert samples[f"{name}_loss"] == list(range(1, STEPS + 1))
    for name in ("device", "host"):
        assert facts[f"{name}_resumed_from_step"] == STEPS // 2
        assert facts[f"{name}_different_after_resume"] == 0
        assert facts[f"{name}_steps"] == STEPS - STEPS // 2
    assert compute.num_updates > 0
    assert facts["device_to_host_bytes"] == 0
    assert facts["host_to_host_bytes"] > 0


@pytest.mark.parametrize("what", ["again", "device", "host"])
def test_one_wrong_bit_in_one_step_is_noticed(what, tmp_path, gpu, device, compute, monkeypatch):
    number = {"again": 1, "device": 0, "host": 1}[what]
    changed: Any = gpu_training.InMemory if what == "again" else gpu_training.OnDrive
    steps: dict[int, int] = {}
    """By the number of the object, which must not outlive its run: it has memory of the device."""
    original = changed.step

    def step(self: Any) -> None:
        original(self)
        steps[id(self)] = steps.get(id(self), 0) + 1
        if steps[id(self)] == STEPS and list(steps).index(id(self)) == number:
            with torch.no_grad():
                self.model.small.view(torch.int16)[7:8].bitwise_xor_(1)

    monkeypatch.setattr(changed, "step", step)
    wrong, found = measured(tmp_path)
    assert found["samples"][f"{what}_different"] == [0] * (STEPS - 1) + [1]
    words = {"again": "the same bits twice", "device": "other bits than", "host": ""}
    assert words[what] in wrong
    assert bool(wrong) == bool(words[what])
