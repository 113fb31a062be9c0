"""Whether the update kernel gives torch's own bits here, found by trying both.

No table says on which processors, and with which versions of torch, the kernel is right. When a
kind of step is first needed in a process, a few thousand elements are stepped by the kernel and by
torch's code. Any difference, and torch's code is used.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch

from offload.ambient import in_neutral
from offload.format.arrays import MASTER, MASTER_LOW, MasterFormat, StateDtype, StateFormat
from offload.format.layout import Layout, ModelTensor, ParameterSpec
from offload.update.dtypes import DTYPE_CODES, DTYPES
from offload.update.kept_state import Rule, Scalars
from offload.update.kernel import UpdateKernel, find_library, torchs_root
from offload.update.kernel.forms import MOMENTS
from offload.update.kernel.loading import TURNED_OFF, Library
from offload.update.pool import UpdatePool
from offload.update.probe import wide_values
from offload.update.rules import UpdateRule
from offload.update.step_keys import StepInputs
from offload.update.updater import HostUpdater

_MAX_REASON = 300
"""Most characters of a reason, which is stored with each checkpoint."""

_LENGTHS = (1037, 643, 1000, 77)
"""Elements of the parameters of each group: whole vectors, and rests of several lengths."""

_FORMS: tuple[tuple[torch.dtype, torch.dtype, MasterFormat], ...] = (
    (torch.bfloat16, torch.bfloat16, "float32"),
    (torch.float16, torch.float16, "float32"),
    (torch.bfloat16, torch.float32, "split"),
    (torch.float32, torch.float32, "float32"),
)
"""Dtype of a parameter, dtype of its gradient, and form of its master."""

_ADAM: tuple[dict[str, Any], ...] = (
    {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01},
    {"lr": 3e-2, "betas": (0.3, 0.95), "eps": 0.0, "amsgrad": True, "maximize": True},
)
_SGD: tuple[dict[str, Any], ...] = (
    {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    {"lr": 1e-1, "momentum": 0.8, "dampening": 0.3, "maximize": True},
    {"lr": 1e-1, "weight_decay": 0.01},
)


@dataclass(frozen=True, slots=True)
class ChosenCode:
    """Code that updates state on a CPU."""

    kernel: UpdateKernel | None
    """The kernel; None if torch's own code is used."""

    code: str
    """The same in words, with the reason if torch's code is used."""


def choose_kernel(optimizer_class: type[torch.optim.Optimizer], state_dtype: str) -> ChosenCode:
    """Return the kernel for a class and a form of state, if it gives torch's bits here.

    Parameters that the kernel does not step, such as those of a group with ``foreach=True``, are
    stepped by torch's code all the same.
    """
    step = optimizer_class.step
    found = _trusted(optimizer_class, state_dtype, step)  # type: ignore[arg-type]  # have a hash
    if isinstance(found, str):
        return ChosenCode(None, f"torch ({' '.join(found.split())[:_MAX_REASON]})")
    library, root = found
    kernel = UpdateKernel(library, root, optimizer_class)
    return ChosenCode(kernel, f"kernel ({library.instructions})")


@cache
@in_neutral
def _trusted(
    optimizer_class: Any,
    state_dtype: str,
    step: Any,  # noqa: ARG001
) -> tuple[Library, int] | str:
    """Return the library and the kind of square root, or why torch's code must be used."""
    if optimizer_class not in MOMENTS:
        return f"{optimizer_class.__name__} has no kernel"
    library = find_library()
    if isinstance(library, str):
        if library != TURNED_OFF:
            _say_once(library)
        return library
    root = 0
    if optimizer_class is not torch.optim.SGD and state_dtype == "float32":
        found = torchs_root(library)
        if found is None:
            return "the kernel does not have the square root of this torch on this processor"
        root = found
    kernel = UpdateKernel(library, root, optimizer_class)
    torchs_own = _stepped(optimizer_class, state_dtype, None)
    if _stepped(optimizer_class, state_dtype, kernel) != torchs_own:
        return "the kernel does not give the bits of this torch on this processor"
    return library, root


@cache
def _say_once(reason: str) -> None:
    logging.getLogger("offload").info(
        "updates on the CPU run torch's code, with the same results in several times the processor "
        "time: %s",
        reason,
    )


def _stepped(
    optimizer_class: type[torch.optim.Optimizer],
    state_dtype: str,
    kernel: UpdateKernel | None,
) -> list[bytes]:
    """Return the bytes of parameters and state after a step that always begins with the same."""
    rule = UpdateRule(optimizer_class, {})
    given = _SGD if optimizer_class is torch.optim.SGD else _ADAM
    groups = [{**rule.defaults, **group} for group in given]
    values = _Values()
    specs, parameters, gradients = [], [], []
    for number, group in enumerate(groups):
        for (dtype, gradient_dtype, master), length in zip(_FORMS, _LENGTHS, strict=True):
            form = StateFormat(master, cast("StateDtype", state_dtype))
            arrays = form.stored_arrays(DTYPE_CODES[dtype], rule.rule(group).arrays)
            name = f"group{number}.{dtype}.{master}"
            specs.append(ParameterSpec(name, DTYPE_CODES[dtype], (length,), number, arrays))
            parameters.append(values.wide(length).to(dtype))
            gradients.append(values.wide(length).to(gradient_dtype))
    model = tuple(ModelTensor(spec.name, spec.dtype, spec.shape) for spec in specs)
    layout = Layout(tuple(specs), model, 1 << 20, state_dtype)
    scalars = [_scalars(rule.rule(group)) for group in groups for _ in _FORMS]
    inputs = StepInputs(
        layout=layout,
        groups=groups,
        parameters=parameters,
        gradients=gradients,
        scalars=scalars,
        step=8,
        seed=1,
        factors=(0.5, 0.37),
    )
    stored = {
        name: values.stored(name, share.nbytes, layout.formats[name].dtype)
        for name, share in layout.plans[0].arrays.items()
    }
    pool = UpdatePool(rule)
    try:
        updater = HostUpdater(rule, pool, inputs, kernel=kernel)
        updater.update(0, stored)
        updater.finish()
    finally:
        pool.close()
    tensors = [*parameters, *stored.values()]
    return [tensor.view(torch.uint8).numpy().tobytes() for tensor in tensors]


def _scalars(rule: Rule) -> Scalars:
    return tuple((name, kind, 7.0) for name, kind in rule.scalars.items())


class _Values:
    """Pseudorandom values, the same ones for each object."""

    def __init__(self) -> None:
        self._generator = torch.Generator("cpu").manual_seed(20260101)

    def wide(self, length: int) -> torch.Tensor:
        """Return FP32 values of many magnitudes, zeros among them; shape (length,)."""
        values = wide_values(length, self._generator)
        values[::7] = 0
        return values

    def stored(self, name: str, nbytes: int, code: str) -> torch.Tensor:
        """Return stored values of an array, whose number is given in bytes."""
        dtype = DTYPES[code]
        length = nbytes // dtype.itemsize
        if not dtype.is_floating_point:
            bytes_ = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            bytes_.random_(1, 256, generator=self._generator)
            if name not in (MASTER, MASTER_LOW):
                bytes_[bytes_ == 128] = 0  # no code of int8 state
            return bytes_.view(dtype)
        values = self.wide(length)
        return (values if name in ("exp_avg", "momentum_buffer", MASTER) else values.abs()).to(
            dtype
        )
