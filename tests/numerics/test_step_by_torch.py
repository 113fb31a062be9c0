"""torch's half of the comparison with kernels, on the CPU: the step that a kernel has to equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from offload.device.kernels.forms import Form
from offload.update.device_check import _STEP, _groups, step_by_torch
from offload.update.pool import BlockContext
from offload.update.rules import UpdateRule

CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
}
MOMENTS = {
    ("adamw", 2): ("exp_avg", "exp_avg_sq"),
    ("adamw", 3): ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    ("adam", 2): ("exp_avg", "exp_avg_sq"),
    ("adam", 3): ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    ("sgd", 0): (),
    ("sgd", 1): ("momentum_buffer",),
}


@pytest.mark.parametrize("arithmetic", ["foreach", "fused"])
@pytest.mark.parametrize(("name", "num_moments"), MOMENTS, ids=str)
def test_it_is_the_step_of_the_class_after_as_many_steps(
    name: str, num_moments: int, arithmetic: Any
) -> None:
    kind = torch.bfloat16
    form = Form(name, arithmetic, kind, kind, "float32", "float32", num_moments)
    rule = UpdateRule(CLASSES[name], {}, allow_fused=True)
    generator = torch.Generator().manual_seed(5)
    for group in _groups(rule, form):
        values = [torch.randn(1000, generator=generator) for _ in range(2 + num_moments)]
        parameter, gradient, *moments = values
        state = dict(zip(MOMENTS[name, num_moments], moments, strict=True))
        for squares in moments[1:]:
            squares.abs_()
        expected = torch.nn.Parameter(parameter.clone())
        expected.grad = gradient.clone()
        hyper = {k: v for k, v in group.items() if k != "decoupled_weight_decay" or name == "adam"}
        optimizer = CLASSES[name]([expected], **hyper)
        optimizer.state[expected] = {key: value.clone() for key, value in state.items()}
        if name != "sgd":
            optimizer.state[expected]["step"] = torch.tensor(float(_STEP - 1))
        optimizer.step()
        step_by_torch(BlockContext(rule), parameter, gradient, state, group)
        assert torch.equal(parameter, expected.detach())
        for key, value in state.items():
            assert torch.equal(value, optimizer.state[expected][key]), key
        if name != "sgd":
            assert optimizer.state[expected]["step"] == _STEP
