"""Loss scaling of fp16 parameters: as torch's scaler does it with FP32 masters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import offload
from gds import MemoryBackend
from offload.errors import OverlapError, UnsupportedParameterError
from tests.numerics.reference import (
    Reference,
    assert_same_bits,
    assert_same_parameters,
    assert_same_state,
    read_state,
)
from tests.stores.small import make_optimizer

NUM_STEPS = 12
SCALE = {"init_scale": 2.0**10, "growth_interval": 3}
MAX_NORM = 7e-6
"""Below the norm of most steps' gradients."""


class Half(torch.nn.Module):
    """fp16 parameters and, unless `only` those, two others."""

    def __init__(self, seed: int = 0, *, only: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = torch.nn.Linear(19, 67).half()
        self.second = torch.nn.Linear(67, 21).half()
        dtypes = [torch.float16] * 2 if only else [torch.float32, torch.bfloat16]
        self.gain = torch.nn.Parameter(torch.ones(21, dtype=dtypes[0]))
        self.shift = torch.nn.Parameter(torch.zeros(21, dtype=dtypes[1]))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.second(self.first(inputs).relu()).float()
        return hidden * self.gain.float() + self.shift.float()


def loss_of(model: torch.nn.Module, step: int) -> torch.Tensor:
    """A loss with gradients of which many are below what fp16 holds, unless they are scaled."""
    generator = torch.Generator().manual_seed(step)
    out = model(torch.randn(8, 19, generator=generator).half())
    return (out * 2.0**-9 - 2.0**-8).square().mean() * (float("inf") if step % 5 == 3 else 1.0)


class ScaledReference(Reference):
    """FP32 masters whose FP32 gradients torch's own scaler and clipping work on."""

    scaler: torch.amp.GradScaler
    max_norm: float | None = None
    norm: torch.Tensor | None = None

    def _step_inner(self) -> None:
        if self.max_norm is not None:
            self.scaler.unscale_(self.inner)
            self.norm = torch.nn.utils.clip_grad_norm_(self.masters.values(), self.max_norm)
        self.scaler.step(self.inner)
        self.scaler.update()


def offloaded(
    model: torch.nn.Module,
    backend: MemoryBackend | None = None,
    cls: Any = torch.optim.AdamW,
    overlap: Any = None,
    **hyper: Any,
) -> offload.OffloadedOptimizer:
    settings = {"overlap": overlap, "ring_chunks": 2}
    made = partial(offload.OffloadedOptimizer, cls)
    return make_optimizer(model, backend or MemoryBackend(), made, settings=settings, **hyper)


DECAYING = {"lr": 3.0, "momentum": 0.9, "weight_decay": 0.1, "maximize": True}


@pytest.mark.parametrize(
    ("cls", "hyper", "max_norm", "overlap", "factor"),
    [
        (torch.optim.AdamW, {"lr": 1e-2}, None, None, 2.0),
        (torch.optim.AdamW, {"lr": 1e-2}, MAX_NORM, "forward", 2.0),
        (torch.optim.AdamW, {"lr": 1e-2, "foreach": True}, MAX_NORM, None, 1.7),
        (torch.optim.SGD, {"lr": 10.0}, None, None, 1.7),
        (torch.optim.SGD, DECAYING, MAX_NORM, None, 2.0),
    ],
    ids=["adamw", "clipped-forward", "clipped-foreach", "sgd", "sgd-clipped"],
)
def test_the_bits_are_those_of_fp32_gradients_that_torchs_scaler_unscaled(
    cls: Any, hyper: dict[str, Any], max_norm: float | None, overlap: str | None, factor: float
) -> None:
    live, expected, backend = Half(), Half(), MemoryBackend()
    optimizer = offloaded(live, backend, cls, overlap, **hyper)
    reference = ScaledReference(cls, expected.parameters(), **hyper)
    settings = {**SCALE, "growth_factor": factor, "backoff_factor": 1 / factor}
    scaler = offload.GradScaler("cpu", **settings)
    reference.scaler = torch.amp.GradScaler("cpu", **settings)
    reference.max_norm = max_norm
    num_skipped = num_clipped = num_lost = 0
    for step in range(NUM_STEPS):
        for model, scale in ((live, scaler), (expected, reference.scaler)):
            model.zero_grad()
            scale.scale(loss_of(model, step)).backward()
        before = [p.grad.clone() for p in live.parameters()]
        num_skipped += not all(g.isfinite().all() for g in before)
        unscaled = live.first.weight.grad.float() / scaler.get_scale()
        num_lost += (unscaled.half() != unscaled).sum().item()
        if max_norm is not None:
            norm = scaler.clip_grad_norm_(optimizer, max_norm)
            num_clipped += norm.item() > max_norm
        if overlap is None:
            for parameter, gradient in zip(live.parameters(), before, strict=True):
                assert_same_bits(parameter.grad, gradient, "gradient")
        scaler.step(optimizer)
        scaler.update()
        reference.step()
        if max_norm is not None and norm.isfinite():
            assert_same_bits(norm, reference.norm, "norm")
        assert scaler.state_dict() == reference.scaler.state_dict()
        if step == 7:
            optimizer.checkpoint({"scaler": scaler.state_dict()}).result()
            optimizer.close()
            live, backend = Half(seed=99), backend.reopened()
            optimizer = offloaded(live, backend, cls, overlap, **hyper)
            scaler = offload.GradScaler("cpu")
            scaler.load_state_dict(optimizer.restore().train_state["scaler"])
        optimizer.synchronize()
        assert_same_parameters(live.named_parameters(), expected.named_parameters())
    assert num_skipped == 2
    assert num_lost > 1000  # of which fp16 cannot hold the unscaled value
    assert (num_clipped > 0) == (max_norm is not None)
    stored = read_state(optimizer.checkpoint().result().path, backend)
    assert_same_state(stored, reference, dict(expected.named_parameters()))
    optimizer.close()


@pytest.fixture
def fired() -> Iterator[list[torch.optim.Optimizer]]:
    seen: list[torch.optim.Optimizer] = []
    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: seen.append(optimizer))
    yield seen
    hook.remove()


@pytest.mark.filterwarnings("ignore:the reference that state_dict")
@pytest.mark.parametrize(
    ("where", "bad", "which"),
    [
        ("first", float("inf"), "fp16"),
        ("after a checkpoint", float("nan"), "fp32"),
    ],
)
def test_a_skipped_step_touches_nothing(where: str, bad: float, which: str, fired: Any) -> None:
    model = Half()
    with offloaded(model) as optimizer:
        scaler = offload.GradScaler("cpu", **SCALE)
        scaler.scale(loss_of(model, 0)).backward()
        if where == "after a checkpoint":
            scaler.step(optimizer)
            scaler.update()
            optimizer.checkpoint().result()
        optimizer.synchronize()
        fired.clear()
        stats, reference = optimizer.stats(), optimizer.state_dict()
        before = [p.detach().clone() for p in model.parameters()]
        parameter = model.second.weight if which == "fp16" else model.gain
        parameter.grad.view(-1)[-3] = bad
        scaler.step(optimizer)
        scaler.update()
        optimizer.synchronize()
        assert scaler.get_scale() == SCALE["init_scale"] / 2
        assert not fired
        assert optimizer.state_dict() == reference
        after = optimizer.stats()
        assert (after.bytes_read, after.bytes_written) == (stats.bytes_read, stats.bytes_written)
        for parameter, value in zip(model.parameters(), before, strict=True):
            assert_same_bits(parameter, value, "parameter")


@pytest.mark.parametrize("enabled", [True, False], ids=["accumulated", "switched off"])
def test_gradients_accumulate_scaled_and_a_scaler_that_is_off_does_nothing(enabled: bool) -> None:
    live, expected = Half(), Half()
    optimizer = offloaded(live, lr=1e-2)
    reference = ScaledReference(torch.optim.AdamW, expected.parameters(), lr=1e-2)
    reference.scaler = torch.amp.GradScaler("cpu", **SCALE, enabled=enabled)
    scaler = offload.GradScaler("cpu", **SCALE, enabled=enabled)
    for step in range(0, 15, 5):
        for model, scale in ((live, scaler), (expected, reference.scaler)):
            model.zero_grad()
            for number in range(3):
                scale.scale(loss_of(model, step + number)).backward()
        if not enabled:
            scaler.unscale_(optimizer)
            scaler.clip_grad_norm_(optimizer, 1e-3)
            torch.nn.utils.clip_grad_norm_(expected.parameters(), 1e-3)
        scaler.step(optimizer)
        scaler.update()
        reference.step()
        assert_same_parameters(live.named_parameters(), expected.named_parameters())
    optimizer.close()


def test_without_fp16_gradients_every_method_is_torchs() -> None:
    models = [torch.nn.Linear(9, 5), torch.nn.Linear(9, 5)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [
        offloaded(models[0], lr=1e-2),
        torch.optim.AdamW(models[1].parameters(), lr=1e-2),
    ]
    scalers = [offload.GradScaler("cpu", **SCALE), torch.amp.GradScaler("cpu", **SCALE)]
    for step in range(8):
        norms = []
        for model, optimizer, scaler in zip(models, optimizers, scalers, strict=True):
            optimizer.zero_grad()
            inputs = torch.randn(4, 9, generator=torch.Generator().manual_seed(step))
            loss = model(inputs).square().mean() * (float("nan") if step == 5 else 1.0)
            scaler.scale(loss).backward()
            if step % 2 and isinstance(scaler, offload.GradScaler):
                norms.append(scaler.clip_grad_norm_(optimizer, 0.1))
            else:
                scaler.unscale_(optimizer)
                norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].state_dict() == scalers[1].state_dict()
        assert_same_parameters(models[0].named_parameters(), models[1].named_parameters())
        if step != 5:
            assert_same_bits(norms[0], norms[1], "norm")
            for ours, theirs in zip(*(m.parameters() for m in models), strict=True):
                assert_same_bits(ours.grad, theirs.grad, "unscaled gradient")
    optimizers[0].close()


@pytest.mark.parametrize("overlap", [None, "forward"])
@pytest.mark.parametrize("plain", [False, True], ids=["torch's scaler", "torch's optimizer"])
def test_torchs_scaler_refuses_fp16_gradients_and_changes_nothing(
    overlap: str | None, plain: bool
) -> None:
    """As this package's does for other optimizers."""
    model = Half()
    with offloaded(model, overlap=overlap) as optimizer:
        scaler = (offload if plain else torch.amp).GradScaler("cpu", **SCALE)
        scaler.scale(loss_of(model, 0)).backward()
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
            scaler.step(torch.optim.SGD(model.parameters()) if plain else optimizer)
        assert optimizer.num_steps == 0
        for parameter, value in zip(model.parameters(), before, strict=True):
            assert_same_bits(parameter, value, "parameter")


Call = Callable[[offload.GradScaler, offload.OffloadedOptimizer], object]


def step_twice(scaler: offload.GradScaler, optimizer: offload.OffloadedOptimizer) -> None:
    scaler.step(optimizer)
    scaler.step(optimizer)


def step_and_clip(scaler: offload.GradScaler, optimizer: offload.OffloadedOptimizer) -> None:
    scaler.step(optimizer)
    scaler.clip_grad_norm_(optimizer, 1.0)


@pytest.mark.parametrize(
    ("call", "error", "says", "num_steps"),
    [
        (
            lambda scaler, optimizer: scaler.unscale_(optimizer),
            UnsupportedParameterError,
            r"scaler\.clip_grad_norm_\(optimizer, max_norm\) in place of unscale_\(\)",
            0,
        ),
        (step_twice, RuntimeError, "already been called since the last update", 1),
        (step_and_clip, RuntimeError, "called after step", 1),
        (
            lambda scaler, optimizer: scaler.step(optimizer, closure=lambda: 0.0),
            RuntimeError,
            "Closure use is not currently supported",
            0,
        ),
    ],
    ids=["unscale_", "a second step", "clipping after it", "a closure"],
)
def test_calls_that_are_refused(
    call: Call, error: type[Exception], says: str, num_steps: int
) -> None:
    model = Half()
    with offloaded(model) as optimizer:
        scaler = offload.GradScaler("cpu", **SCALE)
        scaler.scale(loss_of(model, 0)).backward()
        with pytest.raises(error, match=says):
            call(scaler, optimizer)
        assert optimizer.num_steps == num_steps
        if num_steps:
            scaler.update()
            scaler.scale(loss_of(model, 1)).backward()
        scaler.step(optimizer)
        assert optimizer.num_steps == num_steps + 1


@pytest.mark.parametrize("how", ["step", "clip"])
def test_a_step_that_began_in_backward(how: str) -> None:
    model = Half(only=True)
    with offloaded(model, overlap="backward") as optimizer:
        scaler = offload.GradScaler("cpu", **SCALE)
        scaler.scale(loss_of(model, 0)).backward()
        with pytest.raises(OverlapError, match="scaled gradients had been applied"):
            scaler.step(optimizer) if how == "step" else scaler.clip_grad_norm_(optimizer, 1.0)
