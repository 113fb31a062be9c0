"""The kernel's bits are those of torch's single-tensor step on FP32 masters."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

from offload.update.kernel import UpdateKernel
from offload.update.rules import UpdateRule
from tests.update_kernel.steps import Problem, by_torch, by_updater, kernel_for, num_different
from tests.update_kernel.values import KINDS

FORMS = [
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.float16),
    (torch.float16, torch.float16),
    (torch.float16, torch.float32),
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
]
"""Dtypes of a parameter and of its gradient."""

ADAMS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.1, "lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6},
    {"amsgrad": True, "maximize": True, "weight_decay": 0.01},
    {"betas": (0.3, 0.5), "eps": 0.0, "lr": 0.5},
    {"betas": (0.5, 0.999), "lr": 1e4, "weight_decay": 1e-5},
    {"lr": 0.0, "weight_decay": 0.1},
]
SGDS: list[dict[str, Any]] = [
    {"lr": 0.1},
    {"lr": 0.1, "weight_decay": 0.01, "maximize": True},
    {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    {"lr": 3.0, "momentum": 0.8, "dampening": 0.3},
    {"lr": 0.1, "momentum": 0.5, "dampening": 1.0, "maximize": True},
]
GROUPS = [
    *product([torch.optim.AdamW, torch.optim.Adam], ADAMS),
    *product([torch.optim.SGD], SGDS),
]


def problem(
    optimizer: type[torch.optim.Optimizer],
    changes: dict[str, Any],
    form: tuple[torch.dtype, torch.dtype],
    kind: str,
    num: int,
    **others: Any,
) -> Problem:
    generator = torch.Generator().manual_seed(num)
    make = KINDS[kind]
    rule = UpdateRule(optimizer, {})
    group = {**rule.defaults, **changes}
    dtype, gradient_dtype = form
    exact = make(num, generator)
    live = exact.to(dtype)
    if dtype != torch.float32:
        live[3::17] = make(len(live[3::17]), generator).to(dtype)  # edited since the last step
    state = {}
    for name in rule.rule(group).arrays:
        state[name] = make(num, generator)
        if name.endswith("_sq") and kind != "bits":
            state[name].square_()
    return Problem(
        optimizer,
        group,
        live,
        make(num, generator).to(gradient_dtype),
        None if dtype == torch.float32 else exact,
        state,
        **others,
    )


def compare(one: Problem, kernel: UpdateKernel) -> Iterator[str]:
    live, master, state = by_updater(one, kernel)
    expected_live, expected_master, expected_state = by_torch(one)
    pairs = {
        "parameter": (live, expected_live),
        "master": (master, expected_master),
        **{name: (state[name], expected_state[name]) for name in state},
    }
    for name, (found, expected) in pairs.items():
        if num := num_different(found, expected):
            yield f"{name}: {num} of {found.numel()} differ"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "form", FORMS, ids=lambda form: f"{form[0]}-{form[1]}".replace("torch.", "")
)
@pytest.mark.parametrize(("optimizer", "changes"), GROUPS, ids=str)
def test_one_step(
    optimizer: type[torch.optim.Optimizer],
    changes: dict[str, Any],
    form: tuple[torch.dtype, torch.dtype],
    kind: str,
) -> None:
    # A multiple of 16: torch's own tail differs from its vectors in signs of zeros, and in NaN.
    one = problem(optimizer, changes, form, kind, 16 * 311)
    assert list(compare(one, kernel_for(optimizer))) == []


@pytest.mark.parametrize("num", [*range(1, 70), 127, 4095, 4097, 8191, 12345])
def test_every_length(num: int) -> None:
    for optimizer, changes in ((torch.optim.AdamW, {"amsgrad": True}), (torch.optim.SGD, SGDS[2])):
        for form in FORMS:
            one = problem(optimizer, changes, form, "ordinary", num)
            assert list(compare(one, kernel_for(optimizer))) == []


@pytest.mark.parametrize("step", [1, 2, 10, 1000, 100_000])
@pytest.mark.parametrize("factors", [(), (2.0**-16,), (2.0**-10, 0.3), (3.0, 0.1, 7.0, 0.01)])
def test_steps_and_factors(step: int, factors: tuple[float, ...]) -> None:
    for form in FORMS:
        one = problem(torch.optim.AdamW, {}, form, "wide", 1600, step=step, factors=factors)
        assert list(compare(one, kernel_for(torch.optim.AdamW))) == []


def test_more_factors_than_the_kernel_takes() -> None:
    factors = (2.0, 0.5, 3.0, 0.25, 0.9)
    one = problem(torch.optim.AdamW, {}, FORMS[0], "ordinary", 1600, factors=factors)
    assert list(compare(one, kernel_for(torch.optim.AdamW))) == []
