"""One step of one parameter by the kernel's chunk code, and by torch's optimizers on FP32 masters.

The reference knows nothing of the kernel: it is torch's own class with ``foreach=False``, given the
masters, the upcast and scaled gradients, and a copy of the state. `bench.same_bits` and the tests
compare the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from offload.format.arrays import MASTER, StateFormat
from offload.format.layout import Layout, ModelTensor, ParameterSpec
from offload.update.dtypes import DTYPE_CODES
from offload.update.kernel import UpdateKernel
from offload.update.pool import UpdatePool
from offload.update.rules import UpdateRule
from offload.update.step_keys import StepInputs
from offload.update.updater import HostUpdater


def wide(num: int, generator: torch.Generator) -> torch.Tensor:
    """Return FP32 values of many magnitudes, with zeros of both signs."""
    scale = torch.empty(num).uniform_(-30, 12, generator=generator).exp_()
    values = torch.randn(num, generator=generator) * scale
    values[::11], values[5::13] = 0.0, -0.0
    return values


def ordinary(num: int, generator: torch.Generator) -> torch.Tensor:
    """Return FP32 values like those of a training."""
    return torch.randn(num, generator=generator) * 0.02


def random_bits(num: int, generator: torch.Generator) -> torch.Tensor:
    """Return FP32 values of random bits: denormal numbers, infinities and NaN are among them."""
    bits = torch.randint(-(1 << 31), 1 << 31, (num,), generator=generator, dtype=torch.int64)
    special = [0, -(1 << 31), 1, -(1 << 31) + 1, 0x7F800000, -0x800000, 0x7FC00000, 0x00800000]
    bits[: len(special)] = torch.tensor(special)
    return bits.to(torch.int32).view(torch.float32)


KINDS = {"ordinary": ordinary, "wide": wide, "bits": random_bits}
"""Ways to make values, by name."""

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
"""Classes and hyper-parameters that together take every branch of the kernel."""

Stepped = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]
"""Parameter, master and moments after a step."""


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


def by_torch(problem: Problem) -> Stepped:
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


def by_updater(problem: Problem, kernel: UpdateKernel | None) -> Stepped:
    """Return the same from `HostUpdater`, with a kernel or with torch's code."""
    rule = UpdateRule(problem.optimizer, {})
    live = problem.live.clone()
    code = DTYPE_CODES[live.dtype]
    arrays = StateFormat().stored_arrays(code, tuple(problem.state))
    spec = ParameterSpec("p", code, tuple(live.shape), 0, arrays)
    layout = Layout((spec,), (ModelTensor("p", code, tuple(live.shape)),), 1 << 24)
    scalars = tuple(
        (name, kind, float(problem.step)) for name, kind in rule.rule(problem.group).scalars.items()
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
        updater = HostUpdater(rule, pool, inputs, kernel=kernel)
        updater.update(0, stored)
        updater.finish()
    finally:
        pool.close()
    master = stored.pop(MASTER, live)
    return live, master, stored


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of floating-point values, as integers."""
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.itemsize])


def num_different(found: torch.Tensor, expected: torch.Tensor) -> int:
    """Return how many values have other bits; any NaN equals any other."""
    both_nan = found.isnan() & expected.isnan()
    return int(((bits(found) != bits(expected)) & ~both_nan).sum())


def make_problem(
    optimizer: type[torch.optim.Optimizer],
    changes: Mapping[str, Any],
    form: tuple[torch.dtype, torch.dtype],
    kind: str,
    num: int,
    *,
    seed: int | None = None,
    **others: Any,
) -> Problem:
    """Return a problem of random values.

    Args:
        optimizer: Class of the optimizer.
        changes: Hyper-parameters that are not the defaults.
        form: Dtypes of the parameter and of its gradient; one of `FORMS`.
        kind: How values are made; a key of `KINDS`.
        num: Number of elements.
        seed: Seed of the values; the number of elements if left out.
        others: Further fields of the problem.
    """
    generator = torch.Generator().manual_seed(num if seed is None else seed)
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


def differences(problem: Problem, kernel: UpdateKernel) -> dict[str, int]:
    """Return how many values of which tensors differ between the kernel and torch's optimizer."""
    live, master, state = by_updater(problem, kernel)
    expected_live, expected_master, expected_state = by_torch(problem)
    found = {
        "parameter": num_different(live, expected_live),
        "master": num_different(master, expected_master),
        **{name: num_different(state[name], expected_state[name]) for name in state},
    }
    return {name: num for name, num in found.items() if num}
