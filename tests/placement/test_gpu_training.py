"""`bench.gpu_training` over the substitute for a device: what it compares, and what it notices."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from bench import gpu_training
from bench._harness import Result
from tests.fake_gpu.device import on_device, upload

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


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (None, ""),
        ("again", "the same bits twice"),
        ("device", "other bits than"),
        ("host", ""),  # which may differ, and is recorded
    ],
)
@pytest.mark.parametrize("gpu", ["gds"], indirect=True)
def test_one_wrong_bit_in_one_step_is_noticed_and_none_where_there_is_none(
    what, words, gpu, directory, device, compute, tmp_path, monkeypatch
):
    number = {"again": 1, "device": 0, "host": 1}.get(what, -1)
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
    (tmp_path / "store").mkdir()
    arguments = ["--model", "tiny", "--steps", str(STEPS), "--output", str(tmp_path / "results")]
    args = gpu_training._arguments(arguments)
    result = Result("gpu_training", args, directory)
    wrong = gpu_training.measure(args, result, directory, TASK)
    found = json.loads(result.write().read_text())
    assert words in wrong
    assert bool(wrong) == bool(words)
    samples, facts = found["samples"], found["facts"]
    for name in ("again", "device", "host"):
        assert samples[f"{name}_different"] == [0] * (STEPS - 1) + [int(name == what)]
        assert samples[f"{name}_loss"] == list(range(1, STEPS + 1))
    if what is None:
        for name in ("device", "host"):
            assert facts[f"{name}_resumed_from_step"] == STEPS // 2
            assert facts[f"{name}_different_after_resume"] == 0
        assert compute.num_updates > 0
        assert facts["device_to_host_bytes"] == 0
        assert facts["host_to_host_bytes"] > 0
