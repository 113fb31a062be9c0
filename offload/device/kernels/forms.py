"""Variants of the update kernel.

A variant is compiled for the rule, the dtypes and the stored forms of a block's state. `launches`
has the values that change from step to step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from offload.format.arrays import MASTER, MASTER_LOW

Arithmetic = Literal["foreach", "fused"]
"""Operations and their order: torch's foreach step or its fused kernel, both as on CUDA."""

BLOCK_ELEMENTS = 32
"""Number of elements of a block of 8-bit state. A group of lanes steps this many elements."""

THREADS = 256
GROUPS_PER_TURN = THREADS // 8
"""Number of groups that a block of threads steps at once, on 8 lanes each."""

_RULES = {"sgd": 0, "adam": 1, "adamw": 2}
_ARITHMETICS = {"foreach": 0, "fused": 1}
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
KERNEL_DTYPES = frozenset(_DTYPES)
"""Dtypes of parameters and gradients that the kernel accepts."""

_MASTERS = {"own": 0, "float32": 1, "split": 2}
_STATES = {"float32": 0, "bfloat16": 1, "int8": 3}
STATE_DTYPES = {
    "float32": (torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "int8": (torch.int8, torch.uint8),
}
"""Dtypes of the values of the first moment and of the others, by the stored form."""

_MOMENTS = {
    "sgd": ("momentum_buffer",),
    "adam": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "adamw": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
}

MAX_FACTORS = 2
"""Number of factors by which the kernel can multiply a gradient."""


@dataclass(frozen=True, slots=True)
class Form:
    """A variant of the update kernel."""

    rule: str
    """``sgd``, ``adam`` or ``adamw``."""

    arithmetic: Arithmetic
    live: torch.dtype
    gradient: torch.dtype
    master: str
    """``own`` (the live parameter is FP32), ``float32`` or ``split``."""

    state: str
    """Stored form of the state, as in `Options.state_dtype`."""

    num_moments: int

    @property
    def macros(self) -> dict[str, int]:
        """Macros with which the source is compiled, and their values."""
        return {
            "RULE": _RULES[self.rule],
            "ARITHMETIC": _ARITHMETICS[self.arithmetic],
            "LIVE": _DTYPES[self.live],
            "GRADIENT": _DTYPES[self.gradient],
            "MASTER": _MASTERS[self.master],
            "STATE": _STATES[self.state],
            "NUM_MOMENTS": self.num_moments,
        }

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of the state arrays other than masters, in the kernel's order."""
        return _MOMENTS[self.rule][: self.num_moments]

    @property
    def computes_in_fp64(self) -> bool:
        """Whether the rule computes with hyper-parameters in FP64, as torch's fused SGD does."""
        return self.rule == "sgd" and self.arithmetic == "fused"

    @property
    def traffic_bytes(self) -> float:
        """Bytes of device memory read and written per element, in steps after the first."""
        master = {"own": 0, "float32": 4, "split": 2}[self.master]
        moment = {"float32": 4.0, "bfloat16": 2.0, "int8": 1 + 2 / BLOCK_ELEMENTS}[self.state]
        both = self.live.itemsize + master + self.num_moments * moment
        return self.gradient.itemsize + 2 * both


def moment_names(optimizer_class: type[torch.optim.Optimizer]) -> tuple[str, ...]:
    """Return the names of the state arrays of a class that has kernels, in the kernels' order."""
    return _MOMENTS.get(optimizer_class.__name__.lower(), ())


def why_no_kernel(optimizer_class: type[torch.optim.Optimizer], group: Mapping[str, Any]) -> str:
    """Return why the kernel cannot step a parameter group as torch would; empty if it can."""
    name = optimizer_class.__name__
    if optimizer_class not in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        return f"there is no kernel for {name}: only Adam, AdamW and SGD have one"
    if not group.get("fused") and _is_single_tensor(optimizer_class, group):
        return (
            "foreach=False (or fused=False, or a tensor as lr, without foreach=True) asks for "
            "torch's single-tensor step, which rounds differently"
        )
    for key, value in group.items():
        values = value if key == "betas" else (value,)
        if key != "params" and any(isinstance(v, torch.Tensor) and v.is_cuda for v in values):
            return f"{key} is a tensor on a device: reading it would wait for all work there"
    return ""


def _is_single_tensor(
    optimizer_class: type[torch.optim.Optimizer], group: Mapping[str, Any]
) -> bool:
    """Return whether torch takes its single-tensor step on a device, unless ``fused`` is set."""
    foreach = group.get("foreach")
    if foreach is None:
        # If both flags are unset, torch's default is foreach, but not for Adam with a tensor lr.
        is_tensor = isinstance(group.get("lr"), torch.Tensor)
        return group.get("fused") is False or (is_tensor and optimizer_class is not torch.optim.SGD)
    return not foreach


def form_for(
    optimizer_class: type[torch.optim.Optimizer],
    group: Mapping[str, Any],
    *,
    live: torch.dtype,
    gradient: torch.dtype,
    arrays: Mapping[str, torch.dtype],
) -> Form:
    """Return the variant of the kernel for a parameter.

    Args:
        optimizer_class: `torch.optim.Adam`, `AdamW` or `SGD`.
        group: Hyper-parameters.
        live: Dtype of the parameter.
        gradient: Dtype of its gradient.
        arrays: Dtype of the stored values, by the array's name in the layout.

    Raises:
        ValueError: `why_no_kernel` gives a reason, or the dtypes do not fit together. The message
            says which.
    """
    if reason := why_no_kernel(optimizer_class, group):
        raise ValueError(reason)
    if optimizer_class is torch.optim.SGD:
        rule, num_moments = "sgd", int(group["momentum"] != 0)
    else:
        decoupled = group.get("decoupled_weight_decay", optimizer_class is torch.optim.AdamW)
        rule, num_moments = "adamw" if decoupled else "adam", 3 if group["amsgrad"] else 2
    master = "split" if MASTER_LOW in arrays else "float32" if MASTER in arrays else "own"
    names = _MOMENTS[rule][:num_moments]
    state = "float32"
    if names and names[0] in arrays:
        dtype = arrays[names[0]]
        state = next((s for s, pair in STATE_DTYPES.items() if pair[0] == dtype), "")
    for name, found in (("live parameter", live), ("gradient", gradient)):
        if found not in _DTYPES:
            raise ValueError(
                f"the {name} is {found}, but the kernel supports float32, bfloat16 and float16 only"
            )
    if (live == torch.float32) != (master == "own"):
        raise ValueError(f"a {live} parameter cannot have a master of the form {master}")
    if master == "split" and live != torch.bfloat16:
        raise ValueError(f"split masters need a bfloat16 parameter, and this one is {live}")
    if state not in _STATES:
        raise ValueError("state must be float32, bfloat16 or int8 with scales")
    return Form(
        rule=rule,
        arithmetic="fused" if group.get("fused") else "foreach",
        live=live,
        gradient=gradient,
        master=master,
        state=state,
        num_moments=num_moments,
    )
