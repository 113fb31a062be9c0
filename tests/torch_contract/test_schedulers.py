"""Every learning rate scheduler of torch drives an offloaded optimizer as it drives torch's own.

Beside each run is the same torch class on FP32 masters in memory, with a scheduler of its own. Half
way the offloaded run is closed and resumed, with the scheduler's state dict in the train state.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedulers

import offload
from gds import MemoryBackend
from tests.numerics.reference import (
    Reference,
    assert_same_bits,
    assert_same_parameters,
    assert_same_state,
    read_state,
)
from tests.stores.small import make_optimizer, step

NUM_STEPS = 10
RESUME_AFTER = 4
ADAMW, SGD = torch.optim.AdamW, torch.optim.SGD


def decay(epoch: int) -> float:
    return 0.9**epoch


def sequential(o: torch.optim.Optimizer) -> schedulers.SequentialLR:
    parts = [
        schedulers.LinearLR(o, 0.1, total_iters=4),
        schedulers.CosineAnnealingLR(o, 9),
    ]
    return schedulers.SequentialLR(o, parts, milestones=[4])


def chained(o: torch.optim.Optimizer) -> schedulers.ChainedScheduler:
    constant = schedulers.ConstantLR(o, 0.5, total_iters=5)
    return schedulers.ChainedScheduler([constant, schedulers.ExponentialLR(o, 0.9)])


CASES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, [decay, lambda epoch: min(epoch / 4, 1.0)]),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda n: 0.9 + 0.01 * n),
    "StepLR": lambda o: schedulers.StepLR(o, 4, gamma=0.3),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [3, 8, 8], gamma=0.3),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, 0.3, total_iters=8),
    "LinearLR": lambda o: schedulers.LinearLR(o, 0.25, total_iters=9),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.8),
    "SequentialLR": sequential,
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, total_iters=11, power=2.0),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 10, eta_min=1e-5),
    "ChainedScheduler": chained,
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, factor=0.3, patience=1),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 1e-4, 1e-2, 3, 4, cycle_momentum=True),
    "CyclicLR, momentum": lambda o: schedulers.CyclicLR(o, 1e-3, 1e-1, 3, 4, mode="exp_range"),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3, 2),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, [1e-2, 3e-2], total_steps=20),
    "OneCycleLR, momentum": lambda o: schedulers.OneCycleLR(
        o, 1e-1, epochs=4, steps_per_epoch=5, three_phase=True
    ),
}
"""How each is made; those that cycle a momentum are used with SGD, and all others with AdamW."""

BASES = {"LRScheduler", "_LRScheduler"}
"""Not schedulers themselves."""


def make_model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(9, 31), torch.nn.Linear(31, 40)).bfloat16()
    return model.append(torch.nn.Linear(40, 3))


def groups_of(model: torch.nn.Module, tensor: bool) -> list[dict[str, Any]]:
    rates = [torch.tensor(3e-3), torch.tensor(1e-2)] if tensor else [3e-3, 1e-2]
    halves = [list(model[:1].parameters()), list(model[1:].parameters())]
    return [{"params": p, "lr": rate} for p, rate in zip(halves, rates, strict=True)]


def offloaded(
    cls: type[torch.optim.Optimizer], model: torch.nn.Module, backend: MemoryBackend, tensor: bool
) -> offload.OffloadedOptimizer:
    hyper = {"momentum": 0.9} if cls is SGD else {}
    made = partial(offload.OffloadedOptimizer, cls)
    settings = {"train_state_bytes": 16384}
    params = groups_of(model, tensor)
    return make_optimizer(model, backend, made, params=params, settings=settings, **hyper)


def advance(scheduler: Any, step: int) -> None:
    """Step a scheduler as its class wants it."""
    if isinstance(scheduler, schedulers.ReduceLROnPlateau):
        scheduler.step([3.0, 2.0, 2.5, 2.4, 2.3, 2.2][step % 6])
    else:
        scheduler.step()


def test_every_scheduler_that_torch_has_is_here() -> None:
    found = {
        name
        for name, value in vars(schedulers).items()
        if inspect.isclass(value)
        and (issubclass(value, schedulers.LRScheduler) or name in schedulers.__all__)
        and name not in BASES
    }
    assert found == {name.split(",")[0] for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_it_resumes_to_the_bits_of_plain_torch(name: str) -> None:
    """With a number as the learning rate, and with a tensor, in turns."""
    make, tensor = CASES[name], [*CASES].index(name) % 2 == 1
    cls, hyper = (SGD, {"momentum": 0.9}) if "momentum" in name else (ADAMW, {})
    live, expected, backend = make_model(), make_model(), MemoryBackend()
    optimizer = offloaded(cls, live, backend, tensor)
    reference = Reference(cls, groups_of(expected, tensor), **hyper)
    scheduler, twin = make(optimizer), make(reference.inner)
    seen = set()
    for number in range(NUM_STEPS):
        generator = torch.Generator().manual_seed(number)
        for ours, theirs in zip(live.parameters(), expected.parameters(), strict=True):
            ours.grad = torch.randn(ours.shape, generator=generator).to(ours.dtype)
            theirs.grad = ours.grad.clone()
        optimizer.step()
        reference.step()
        for one in (scheduler, twin):
            advance(one, number)
        if number == RESUME_AFTER:
            optimizer.checkpoint({"scheduler": scheduler.state_dict()}).result()
            optimizer.close()
            live, backend = make_model(seed=99), backend.reopened()
            optimizer = offloaded(cls, live, backend, tensor)
            scheduler = make(optimizer)
            scheduler.load_state_dict(optimizer.restore().train_state["scheduler"])
        for ours, theirs in zip(optimizer.param_groups, reference.inner.param_groups, strict=True):
            assert set(ours) == set(theirs)
            for key in set(ours) - {"params"}:
                assert type(ours[key]) is type(theirs[key]), key
                assert ours[key] == theirs[key], key
        seen.add(float(optimizer.param_groups[1]["lr"]))
        assert_same_parameters(live.named_parameters(), expected.named_parameters())
    assert len(seen) > 1
    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor) == tensor
    stored = read_state(optimizer.checkpoint().result().path, backend)
    assert_same_state(stored, reference, dict(expected.named_parameters()))
    optimizer.close()


@pytest.mark.parametrize("rate", ["number", "tensor"])
def test_a_scheduler_that_is_made_after_a_resume_goes_on_from_a_step(rate: str) -> None:
    """``last_epoch=`` needs the ``initial_lr`` of the groups, which a checkpoint keeps."""
    tensor = rate == "tensor"
    live, backend = make_model(), MemoryBackend()
    with offloaded(ADAMW, live, backend, tensor) as optimizer:
        scheduler = schedulers.StepLR(optimizer, 2, gamma=0.5)
        for number in range(3):
            step(optimizer, number)
            scheduler.step()
        optimizer.checkpoint().result()
    live = make_model(seed=99)
    with offloaded(ADAMW, live, backend.reopened(), tensor) as optimizer:
        at = optimizer.restore().step
        again = schedulers.StepLR(optimizer, 2, gamma=0.5, last_epoch=at - 1)
        assert [float(rate) for rate in again.base_lrs] == [
            float(torch.tensor(lr)) if tensor else lr for lr in (3e-3, 1e-2)
        ]
        assert again.last_epoch == 3
        assert again.get_last_lr() == [g["lr"] for g in optimizer.param_groups]


def test_a_learning_rate_tensor_keeps_its_identity() -> None:
    rate = torch.tensor(0.25)
    parameter = torch.nn.Parameter(torch.zeros(5))
    options = offload.Options(backend=MemoryBackend(), allow_volatile=True)
    with offload.SGD([parameter], lr=rate, directory="/store", options=options) as optimizer:
        scheduler = schedulers.ExponentialLR(optimizer, 0.5)
        parameter.grad = torch.ones(5)
        optimizer.step()
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] is rate
        optimizer.step()
        assert_same_bits(parameter.detach(), torch.full((5,), -0.375), "parameter")
