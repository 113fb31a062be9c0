"""Variants of the update kernel, and the arguments of their launches.

A variant is compiled for the rule, the dtypes and the stored forms of a block's state. Values that
change from step to step go into one structure, which is passed by value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from offload.format import rounding_keys
from offload.format.arrays import MASTER, MASTER_LOW, scale_name

Arithmetic = Literal["foreach", "fused"]
"""Operations and their order: torch's foreach step or its fused kernel, both as on CUDA."""

BLOCK_ELEMENTS = 32
"""Number of elements of a block of 8-bit state. A group of lanes steps this many elements."""

_RULES = {"sgd": 0, "adam": 1, "adamw": 2}
_ARITHMETICS = {"foreach": 0, "fused": 1}
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
KERNEL_DTYPES = frozenset(_DTYPES)
"""Dtypes of parameters and gradients that the kernel accepts."""

_MASTERS = {"own": 0, "float32": 1, "split": 2}
_STATES = {"float32": 0, "bfloat16": 1, "int8": 3}
_STATE_DTYPES = {
    "float32": (torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "int8": (torch.int8, torch.uint8),
}
_MOMENTS = {
    "sgd": ("momentum_buffer",),
    "adam": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "adamw": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
}

_IS_NEW, _MAXIMIZE, _NESTEROV, _DECAY, _ALIGNED = (1 << bit for bit in range(5))
_QUAD = 4

ARGUMENTS = np.dtype(
    [
        ("num_elements", np.uint64),
        ("first_element", np.uint64),
        ("gradient", np.uint64),
        ("live", np.uint64),
        ("master", np.uint64),
        ("moments", np.uint64, 3),
        ("scales", np.uint64, 3),
        ("inverse_scale", np.uint64),
        ("clip", np.uint64),
        ("found_inf", np.uint64),
        ("hyper", np.float64, 8),
        ("keys", np.uint32, 6),
        ("flags", np.uint32),
        ("unused", np.uint32),
    ]
)
"""Layout of `struct Arguments` in `update.cu`."""


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
    def traffic_bytes(self) -> float:
        """Bytes of device memory read and written per element, in steps after the first."""
        master = {"own": 0, "float32": 4, "split": 2}[self.master]
        moment = {"float32": 4.0, "bfloat16": 2.0, "int8": 1 + 2 / BLOCK_ELEMENTS}[self.state]
        both = self.live.itemsize + master + self.num_moments * moment
        return self.gradient.itemsize + 2 * both


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBlock:
    """Elements that are stepped in one call: flat, contiguous tensors on one device.

    They share hyper-parameters and scalar state, like a block of `offload.update.blocks`.
    """

    live: torch.Tensor
    """Parameter, shape (n,); updated in place."""

    gradient: torch.Tensor
    """FP32, bf16 or fp16, shape (n,); unchanged."""

    arrays: Mapping[str, torch.Tensor]
    """Stored values by the array's name in the layout (``master``, ``exp_avg``, ``exp_avg_scale``,
    ...); updated in place. Blocks of 32 elements of 8-bit state are counted from the first element
    of the call. If a parameter ends inside a block, the next parameter begins a new block, and
    therefore needs another call."""

    first_element: int = 0
    """Index of the first element, within `parameter` or in element space. Stochastic rounding
    depends on it."""

    parameter: str | None = None
    """Name of the parameter that `first_element` is counted in. None if it is counted in element
    space, as in stores of version 2 of the format. Stochastic rounding depends on it."""

    is_new: bool = False
    """Whether there is no state yet. The step then initialises the arrays, whatever they hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceScalars:
    """Numbers in device memory, so that the host need not wait for them: FP32, one element each."""

    inverse_scale: torch.Tensor | None = None
    """First factor of the gradient, applied in FP32."""

    clip: torch.Tensor | None = None
    """Second factor of the gradient: the coefficient of `torch.nn.utils.clip_grad_norm_`, at most
    1."""

    found_inf: torch.Tensor | None = None
    """Flag that skips the step unless it is 0. Then nothing changes, except that the state of a new
    block is initialised, to masters and zeros."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One launch of the update kernel."""

    form: Form
    arguments: np.ndarray[Any, Any] = field(repr=False)
    """Structure of arguments, of dtype `ARGUMENTS` and shape (1,)."""

    num_groups: int
    """Number of groups of 32 elements."""


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
        state = next((s for s, pair in _STATE_DTYPES.items() if pair[0] == dtype), "")
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


def form_of_block(
    optimizer_class: type[torch.optim.Optimizer], group: Mapping[str, Any], block: DeviceBlock
) -> Form:
    """Return the variant of the kernel for a block.

    Raises:
        ValueError: See `form_for`; or an array is missing, or the tensors differ in length or
            device.
    """
    form = form_for(
        optimizer_class,
        group,
        live=block.live.dtype,
        gradient=block.gradient.dtype,
        arrays={name: array.dtype for name, array in block.arrays.items()},
    )
    _check(form, block)
    return form


def launches(
    optimizer_class: type[torch.optim.Optimizer],
    group: Mapping[str, Any],
    block: DeviceBlock,
    *,
    step: int,
    seed: int = 0,
    rounding_step: int | None = None,
    scalars: DeviceScalars | None = None,
) -> Iterator[Launch]:
    """Yield the launches for a block: one, or two if the rounding key changes inside the block.

    Args:
        optimizer_class: `torch.optim.Adam`, `AdamW` or `SGD`.
        group: Hyper-parameters, as in ``param_groups``; ``fused`` selects the arithmetic.
        block: Block to step.
        step: Value of torch's ``step`` after this step: from 1.
        seed: Seed of stochastic rounding.
        rounding_step: Step number of the store, for stochastic rounding; `step` if None.
        scalars: Factors of the gradient, and whether to skip the step.

    Raises:
        ValueError: See `form_of_block`.
    """
    form = form_of_block(optimizer_class, group, block)
    scalars = scalars or DeviceScalars()
    rounding_step = step if rounding_step is None else rounding_step
    start, num_elements = 0, block.live.numel()
    while start < num_elements:
        first = block.first_element + start
        num = num_elements - start
        if form.state == "bfloat16":
            num = min(
                num, ((first >> rounding_keys.WINDOW_BITS) + 1 << rounding_keys.WINDOW_BITS) - first
            )
        arguments = np.zeros(1, ARGUMENTS)
        record = arguments[0]
        record["num_elements"], record["first_element"] = num, first
        aligned = _set_pointers(record, form, block, start)
        for name in ("inverse_scale", "clip", "found_inf"):
            scalar = getattr(scalars, name)
            if scalar is not None:
                record[name] = scalar.data_ptr()
        hyper = _hyper(form, group, step)
        record["hyper"][: len(hyper)] = hyper
        if form.state == "bfloat16":
            for k, name in enumerate(form.moments):
                record["keys"][2 * k : 2 * k + 2] = _rounding_key(
                    name, seed, rounding_step, block.parameter, first
                )
        decay = group["weight_decay"]
        if form.arithmetic == "fused" and form.rule != "sgd":
            decay = np.float32(decay)
        record["flags"] = (
            _IS_NEW * block.is_new
            + _MAXIMIZE * bool(group["maximize"])
            + _NESTEROV * bool(group.get("nesterov"))
            + _DECAY * bool(decay != 0)
            + _ALIGNED * aligned
        )
        yield Launch(form=form, arguments=arguments, num_groups=-(-num // BLOCK_ELEMENTS))
        start += num


def _check(form: Form, block: DeviceBlock) -> None:
    num = block.live.numel()
    expected: dict[str, tuple[torch.dtype, int]] = {}
    if form.master != "own":
        split = form.master == "split"
        expected[MASTER_LOW if split else MASTER] = (torch.int16 if split else torch.float32, num)
    for k, name in enumerate(form.moments):
        expected[name] = (_STATE_DTYPES[form.state][k > 0], num)
        if form.state == "int8":
            expected[scale_name(name)] = (torch.bfloat16, -(-num // BLOCK_ELEMENTS))
    tensors = {"live parameter": block.live, "gradient": block.gradient, **block.arrays}
    expected |= {"live parameter": (form.live, num), "gradient": (form.gradient, num)}
    if missing := expected.keys() - tensors.keys():
        raise ValueError(f"the block lacks {', '.join(sorted(missing))}")
    for name, (dtype, length) in expected.items():
        tensor = tensors[name]
        if tensor.dtype != dtype or tensor.shape != (length,) or not tensor.is_contiguous():
            raise ValueError(
                f"{name}: expected {length} contiguous values of {dtype}, got {tensor.dtype} of "
                f"shape {tuple(tensor.shape)}"
            )
        if tensor.device != block.live.device:
            raise ValueError(
                f"{name} is on {tensor.device}, and the live parameter on {block.live.device}"
            )


def _set_pointers(record: Any, form: Form, block: DeviceBlock, start: int) -> bool:
    """Set the pointers for the elements from `start` on; return whether all quads are aligned."""
    aligned = True

    def pointer(tensor: torch.Tensor) -> int:
        """Return the address of element `start`, and note whether the quads are aligned."""
        nonlocal aligned
        at = tensor.data_ptr() + start * tensor.itemsize
        aligned &= at % (_QUAD * tensor.itemsize) == 0
        return at

    record["live"], record["gradient"] = pointer(block.live), pointer(block.gradient)
    if form.master != "own":
        record["master"] = pointer(block.arrays[MASTER_LOW if form.master == "split" else MASTER])
    for k, name in enumerate(form.moments):
        record["moments"][k] = pointer(block.arrays[name])
        if form.state == "int8":
            record["scales"][k] = block.arrays[scale_name(name)].data_ptr()
    return aligned


def _hyper(form: Form, group: Mapping[str, Any], step: int) -> tuple[float, ...]:
    lr, decay = float(group["lr"]), float(group["weight_decay"])
    if form.rule == "sgd":
        momentum, dampening = float(group["momentum"]), float(group["dampening"])
        if form.arithmetic == "fused":
            return decay, momentum, dampening, lr
        return decay, momentum, 1 - dampening, -lr
    beta1, beta2 = (float(beta) for beta in group["betas"])
    eps = float(group["eps"])
    if form.arithmetic == "fused":
        return lr, beta1, beta2, decay, eps, float(step)
    return (
        1 - lr * decay if form.rule == "adamw" else decay,
        1 - beta1,
        beta2,
        1 - beta2,
        (1 - beta2**step) ** 0.5,
        eps,
        (lr / (1 - beta1**step)) * -1,
    )


def _rounding_key(
    array: str, seed: int, step: int, parameter: str | None, first_element: int
) -> rounding_keys.Key:
    """Return the key that the CPU would use for an array from `first_element` on."""
    stream, window = rounding_keys.stream_of(array), first_element >> rounding_keys.WINDOW_BITS
    if parameter is None:
        return rounding_keys.element_space_key(seed, stream, step, window)
    return rounding_keys.parameter_key(seed, stream, step, parameter, window)
