"""The kernel's bits are those of torch's single-tensor step on FP32 masters."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench._one_step import FORMS, GROUPS, KINDS, differences, make_problem
from tests.update_kernel.steps import kernel_for


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
    one = make_problem(optimizer, changes, form, kind, 16 * 311)
    assert differences(one, kernel_for(optimizer)) == {}


@pytest.mark.parametrize("num", [*range(1, 70), 127, 4095, 4097, 8191, 12345])
def test_every_length(num: int) -> None:
    for optimizer, changes in (
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ):
        for form in FORMS:
            one = make_problem(optimizer, changes, form, "ordinary", num)
            assert differences(one, kernel_for(optimizer)) == {}


@pytest.mark.parametrize("step", [1, 2, 10, 1000, 100_000])
@pytest.mark.parametrize("factors", [(), (2.0**-16,), (2.0**-10, 0.3), (3.0, 0.1, 7.0, 0.01)])
def test_steps_and_factors(step: int, factors: tuple[float, ...]) -> None:
    for form in FORMS:
        one = make_problem(torch.optim.AdamW, {}, form, "wide", 1600, step=step, factors=factors)
        assert differences(one, kernel_for(torch.optim.AdamW)) == {}


def test_more_factors_than_the_kernel_takes() -> None:
    factors = (2.0, 0.5, 3.0, 0.25, 0.9)
    one = make_problem(torch.optim.AdamW, {}, FORMS[0], "ordinary", 1600, factors=factors)
    assert differences(one, kernel_for(torch.optim.AdamW)) == {}
