"""Masters whose upper half is the parameter, and edits to numbers that no master rounds to."""

from __future__ import annotations

import math

import pytest
import torch

from offload.format.arrays import MASTER_LOW, StateDtype
from tests.update_kernel.chunk_steps import ChunkStep, Parameter
from tests.update_kernel.steps import kernel_for

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
