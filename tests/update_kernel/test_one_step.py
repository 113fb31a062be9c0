"""One step beside torch's own class, and edits to numbers that no split master rounds to."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch

from bench._one_step import FORMS, GROUPS, KINDS, differences, make_problem
from offload.format.arrays import MASTER_LOW, StateDtype
from tests.update_kernel.chunk_steps import ChunkStep, Parameter
from tests.update_kernel.steps import kernel_for


@pytest.mark.parametrize(("optimizer", "changes"), GROUPS, ids=str)
def test_fp32_state_has_the_bits_of_torchs_single_tensor_step(
    optimizer: type[torch.optim.Optimizer], changes: dict[str, Any]
) -> None:
    for form, kind in product(FORMS, KINDS):
        # A multiple of 16: torch's own tail differs from its vectors in signs of zeros, and in NaN.
        one = make_problem(optimizer, changes, form, kind, 16 * 61)
        assert differences(one, kernel_for(optimizer)) == {}, (form, kind)


SPECIAL = [math.inf, -math.inf, 0.0, -0.0, math.nan, 3.3e38, -3.3e38, 1e-40]


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_edits_to_special_numbers(
    optimizer: type[torch.optim.Optimizer], state_dtype: StateDtype
) -> None:
    one = ChunkStep(
        optimizer,
        [Parameter(32 * 40, torch.bfloat16, torch.bfloat16)],
        [{"momentum": 0.9} if optimizer is torch.optim.SGD else {}],
        "split",
        state_dtype,
    )
    (arrays,) = one.stored
    low = torch.tensor([-32768, -1, 0, 1, 32767], dtype=torch.int16)
    arrays[MASTER_LOW].copy_(low.repeat(32 * 8))
    for number, value in enumerate(SPECIAL):
        one.live[0][number :: len(SPECIAL)] = value
    found = one.taken(kernel_for(optimizer, state_dtype))
    expected = one.taken(None)
    assert found.differences(expected, any_nan=True) == []
    infinite = found.live[0].isinf().sum()
    assert infinite >= 2 * 32 * 5 * 3 / 5, "an infinity stays one whatever its remainder was"
