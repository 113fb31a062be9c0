"""The kernel's bits are those of torch's single-tensor step on FP32 masters."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from bench._one_step import FORMS, GROUPS, KINDS, differences, make_problem
from tests.update_kernel.steps import kernel_for


@pytest.mark.parametrize(("optimizer", "changes"), GROUPS, ids=str)
def test_one_step(
    optimizer: type[torch.optim.Optimizer],
    changes: dict[str, Any],
) -> None:
    for form, kind in product(FORMS, KINDS):
        # A multiple of 16: torch's own tail differs from its vectors in signs of zeros, and in NaN.
        one = make_problem(optimizer, changes, form, kind, 16 * 311)
        assert differences(one, kernel_for(optimizer)) == {}, (form, kind)


def test_every_length() -> None:
    for num, (optimizer, changes) in product(
        [*range(1, 70), 127, 4095, 4097, 8191, 12345],
        (
            (torch.optim.AdamW, {"amsgrad": True}),
            (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        ),
    ):
        for form in FORMS:
            one = make_problem(optimizer, changes, form, "ordinary", num)
            assert differences(one, kernel_for(optimizer)) == {}, num


FACTORS = [(), (2.0**-16,), (2.0**-10, 0.3), (3.0, 0.1, 7.0, 0.01), (2.0, 0.5, 3.0, 0.25, 0.9)]
"""Numbers that gradients are multiplied by; more of them than the kernel takes at last."""


@pytest.mark.parametrize("step", [1, 2, 10, 1000, 100_000])
def test_steps_and_factors(step: int) -> None:
    for form, factors in product(FORMS, FACTORS):
        one = make_problem(torch.optim.AdamW, {}, form, "wide", 1600, step=step, factors=factors)
        assert differences(one, kernel_for(torch.optim.AdamW)) == {}
