"""Arguments of the update kernel: structures that `source/update.cpp` reads, and their numbers."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch

from offload.update.kept_state import Scalars

MAX_MOMENTS = 3
MAX_FACTORS = 4
"""Number of factors by which the kernel can multiply a gradient."""

DTYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Numbers of the dtypes of parameters and gradients that the kernel accepts."""

MASTERS: Final = {"own": 0, "float32": 1, "split": 2}
STATES: Final = {"float32": 0, "bfloat16": 1, "int8": 2}
"""Numbers of the stored forms of the state, as in `Options.state_dtype`."""

MOMENTS: Final = {
    torch.optim.SGD: ("momentum_buffer",),
    torch.optim.Adam: ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
}
"""Names of the state arrays of each class that the kernel knows, in the kernel's order."""

_SGD, _SGD_MOMENTUM, _ADAM, _ADAM_AMSGRAD = range(4)
_MAXIMIZE, _DECAY, _DECOUPLED_DECAY, _NESTEROV = (1 << bit for bit in range(4))

RUN = np.dtype(
    [
        ("gradient", np.uint64),
        ("live", np.uint64),
        ("master", np.uint64),
        ("moments", np.uint64, MAX_MOMENTS),
        ("scales", np.uint64, MAX_MOMENTS),
        ("num_elements", np.uint64),
        ("first_element", np.uint64),
        ("keys", np.uint64, MAX_MOMENTS),
        ("group", np.uint32),
        ("gradient_dtype", np.uint32),
        ("live_dtype", np.uint32),
        ("master_form", np.uint32),
    ]
)
"""Layout of `struct Run`: neighbouring elements of one parameter, with the addresses of their
values. Keys are those of `offload.format.rounding_keys.ParameterKeys.of_runs`."""

GROUP = np.dtype(
    [
        ("weight_decay", np.float32),
        ("one_minus_beta1", np.float32),
        ("beta2", np.float32),
        ("one_minus_beta2", np.float32),
        ("root_of_bias_correction2", np.float32),
        ("eps", np.float32),
        ("minus_step_size", np.float32),
        ("momentum", np.float32),
        ("one_minus_dampening", np.float32),
        ("minus_lr", np.float32),
        ("flags", np.uint32),
        ("rule", np.uint32),
    ]
)
"""Layout of `struct Group`: hyper-parameters, as torch's step computes with them."""


class Array(ctypes.Structure):
    """`struct Array`: one stored array of a chunk, and where the digests of its leaves go."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("num_bytes", ctypes.c_uint64),
        ("digests", ctypes.c_void_p),
        ("is_known", ctypes.c_void_p),
    ]


class Job(ctypes.Structure):
    """`struct Job`: the arguments of one call."""

    _fields_ = [
        ("runs", ctypes.c_void_p),
        ("num_runs", ctypes.c_uint64),
        ("groups", ctypes.c_void_p),
        ("num_groups", ctypes.c_uint64),
        ("masters", Array * 2),
        ("moments", Array * MAX_MOMENTS),
        ("scales", Array * MAX_MOMENTS),
        ("factors", ctypes.c_float * MAX_FACTORS),
        ("num_factors", ctypes.c_uint32),
        ("state", ctypes.c_uint32),
        ("root", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
    ]


def why_not(optimizer_class: type[torch.optim.Optimizer], group: Mapping[str, Any]) -> str:
    """Return why the kernel cannot step a parameter group as torch would; empty if it can."""
    if optimizer_class not in MOMENTS:
        return f"{optimizer_class.__name__} is not torch's Adam, AdamW or SGD"
    for flag in ("foreach", "fused", "capturable", "differentiable"):
        if group.get(flag):
            return f"{flag}=True asks for another step of torch"
    for name, value in group.items():
        values = value if isinstance(value, tuple | list) else (value,)
        if any(isinstance(v, torch.Tensor) for v in values):
            return f"{name} is a tensor"
    return ""


def group_values(
    optimizer_class: type[torch.optim.Optimizer],
    group: Mapping[str, Any],
    scalars: Scalars,
) -> tuple[Any, ...]:
    """Return the values of a `GROUP`, computed in double precision as torch's own step does."""
    flags = _MAXIMIZE if group["maximize"] else 0
    decay, lr = group["weight_decay"], group["lr"]
    if optimizer_class is torch.optim.SGD:
        flags |= (_DECAY if decay else 0) | (_NESTEROV if group["nesterov"] else 0)
        momentum = group["momentum"]
        rule = _SGD_MOMENTUM if momentum else _SGD
        rates = (momentum, 1 - group["dampening"], -lr)
        return (decay, 0, 0, 0, 0, 0, 0, *rates, flags, rule)
    if decay and group["decoupled_weight_decay"]:
        flags |= _DECOUPLED_DECAY
        decay = 1 - lr * decay
    elif decay:
        flags |= _DECAY
    beta1, beta2 = group["betas"]
    (step,) = (value for name, _, value in scalars if name == "step")
    root = (1 - beta2**step) ** 0.5
    minus_step_size = -(lr / (1 - beta1**step))
    rule = _ADAM_AMSGRAD if group["amsgrad"] else _ADAM
    numbers = (decay, 1 - beta1, beta2, 1 - beta2, root, group["eps"], minus_step_size)
    return (*numbers, 0, 0, 0, flags, rule)
