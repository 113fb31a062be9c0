"""State in the memory of a real CUDA device: the bits of torch's own optimizer there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.errors import DamagedError
from tests.device.test_cuda_parameters import Network, keep_busy
from tests.numerics.reference import assert_same_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

WIDTH = 384
CHUNK = {"chunk_bytes": 128 << 10, "ring_chunks": 3, "allow_volatile": True}


@pytest.fixture(autouse=True)
def _libraries() -> None:
    pytest.importorskip("cupy")


def gradients(step: int, model: torch.nn.Module) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        yield torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


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


def models() -> tuple[Network, Network]:
    return Network(WIDTH).bfloat16().cuda(), Network(WIDTH).bfloat16().cuda()


def give(step: int, *given: torch.nn.Module) -> None:
    for model in given:
        keep_busy()
        for parameter, gradient in zip(model.parameters(), gradients(step, model), strict=True):
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
    optimizer_class, hyper, device_memory, tmp_path
):
    live, expected = models()
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
    "settings",
    [{}, {"master": "split"}, {"state_dtype": "bfloat16"}, {"state_dtype": "int8"}],
    ids=["float32", "split", "bfloat16", "int8"],
)
@pytest.mark.parametrize("overlap", [None, "forward"])
def test_a_resume_is_bit_identical_to_not_having_stopped(settings, overlap, tmp_path):
    finals = []
    for stops in (False, True):
        directory = tmp_path / str(stops)
        live = Network(WIDTH).bfloat16().cuda()
        settings = {**settings, **CHUNK, "placement": "device", "overlap": overlap}
        optimizer = streamed(live, directory, settings)
        for step in range(4):
            if step == 2 and stops:
                optimizer.checkpoint().result()
                optimizer.close()
                live = Network(WIDTH).bfloat16().cuda()
                optimizer = streamed(live, directory, settings)
                assert optimizer.restore().step == 2
            give(step, live)
            optimizer.step()
        optimizer.synchronize()
        optimizer.close()
        finals.append(live)
    assert_same(finals[1], finals[0], "after a resume")


def test_a_flipped_bit_is_found_by_the_device(tmp_path):
    live = Network(WIDTH).bfloat16().cuda()
    options = offload.Options(placement="device", **CHUNK)
    optimizer = offload.AdamW(live.parameters(), directory=tmp_path, options=options)
    give(0, live)
    optimizer.step()
    path = Path(optimizer.checkpoint().result().path) / "exp_avg.safetensors"
    optimizer.close()
    data = bytearray(path.read_bytes())
    data[-5000] ^= 4
    path.write_bytes(data)
    optimizer = offload.AdamW(live.parameters(), directory=tmp_path, options=options)
    optimizer.restore()
    give(1, live)
    with pytest.raises(DamagedError, match="exp_avg"):
        optimizer.step()
    optimizer.close()
