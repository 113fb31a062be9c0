"""One step of one parameter by the kernel's chunk code, and by torch's optimizers on FP32 masters.

The reference knows nothing of the kernel: it is torch's own class with ``foreach=False``, given the
masters, the upcast and scaled gradients, and a copy of the state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from offload.format.arrays import MASTER, StateFormat
from offload.format.layout import Layout, ModelTensor, ParameterSpec
from offload.update.dtypes import DTYPE_CODES
from offload.update.kernel import UpdateKernel, find_library, torchs_root
from offload.update.pool import UpdatePool
from offload.update.rules import UpdateRule
from offload.update.step_inputs import StepInputs
from offload.update.updaters import host_updater


@dataclass
class Problem:
    """Everything that one step begins with."""

    optimizer: type[torch.optim.Optimizer]
    group: Mapping[str, Any]
    """All hyper-parameters."""

    live: torch.Tensor
    gradient: torch.Tensor
    master: torch.Tensor | None
    """FP32 values that round to `live`, but where `live` has been edited; None for FP32."""

    state: dict[str, torch.Tensor]
    """FP32 moments."""

    step: int = 7
    """Number of steps that have been taken."""

    factors: tuple[float, ...] = ()


def by_torch(problem: Problem) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the parameter, the master and the state after torch's own step in memory."""
    live = problem.live
    if problem.master is None:
        master = live.clone()
    else:
        edited = bits(problem.master.to(live.dtype)) != bits(live)
        master = torch.where(edited, live.float(), problem.master)
    gradient = problem.gradient.float()
    for factor in problem.factors:
        gradient = gradient * factor
    parameter = torch.nn.Parameter(master)
    parameter.grad = gradient.clone()
    options = {k: v for k, v in problem.group.items() if k != "decoupled_weight_decay"}
    optimizer = problem.optimizer([parameter], **{**options, "foreach": False})
    state: dict[str, Any] = {name: values.clone() for name, values in problem.state.items()}
    if problem.optimizer is not torch.optim.SGD:
        state["step"] = torch.tensor(float(problem.step))
    if state:
        optimizer.state[parameter] = state
    optimizer.step()
    state.pop("step", None)
    return parameter.detach().to(live.dtype), parameter.detach(), state


def by_updater(
    problem: Problem, kernel: UpdateKernel | None
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the same from `host_updater`, with a kernel or with torch's code."""
    rule = UpdateRule(problem.optimizer, {})
    live = problem.live.clone()
    code = DTYPE_CODES[live.dtype]
    arrays = StateFormat().stored_arrays(code, tuple(problem.state))
    spec = ParameterSpec("p", code, tuple(live.shape), 0, arrays)
    layout = Layout((spec,), (ModelTensor("p", code, tuple(live.shape)),), 1 << 24)
    scalars = tuple(
        (name, kind, float(problem.step))
        for name, kind in zip(
            rule.rule(problem.group).scalars, rule.rule(problem.group).kinds, strict=True
        )
    )
    inputs = StepInputs(
        layout=layout,
        groups=[problem.group],
        parameters=[live],
        gradients=[problem.gradient],
        scalars=[scalars],
        step=problem.step + 1,
        factors=problem.factors,
    )
    stored = {name: values.clone() for name, values in problem.state.items()}
    if problem.master is not None:
        stored[MASTER] = problem.master.clone()
    pool = UpdatePool(rule)
    try:
        updater = host_updater(rule, pool, inputs, kernel=kernel)
        updater.update(0, stored)
        updater.finish()
    finally:
        pool.close()
    master = stored.pop(MASTER, live)
    return live, master, stored


def kernel_for(
    optimizer: type[torch.optim.Optimizer], state_dtype: str = "float32"
) -> UpdateKernel:
    """Return the kernel without its self-check, so that tests judge it by themselves."""
    library = find_library()
    if isinstance(library, str):
        pytest.skip(f"updates here run torch's code: {library}")
    if optimizer is torch.optim.SGD or state_dtype != "float32":
        return UpdateKernel(library, 0, optimizer)
    root = torchs_root(library)
    if root is None:
        pytest.skip("the kernel does not have the square root of this torch on this processor")
    return UpdateKernel(library, root, optimizer)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of floating-point values, as integers."""
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.itemsize])


def num_different(found: torch.Tensor, expected: torch.Tensor) -> int:
    """Return how many values have other bits; any NaN equals any other."""
    both_nan = found.isnan() & expected.isnan()
    return int(((bits(found) != bits(expected)) & ~both_nan).sum())
