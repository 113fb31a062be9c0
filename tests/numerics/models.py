"""Models with every kind of parameter that must be updated, and gradients made for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

FIRST_LATE_STEP = 7
"""Parameters whose name begins with ``late`` get their first gradient at this step."""

EMPTY_STEP = 11
"""At this step no parameter has a gradient."""


class Mixed(torch.nn.Module):
    """One parameter of every kind; 21 thousand elements. Names say what gradients they get.

    `give_gradients` gives none to ``never``, none until `FIRST_LATE_STEP` to ``late``, none in
    every third step to ``sometimes``, stride-0 ones to ``expanded``, and FP32 or FP64 ones to
    ``wide32`` and ``wide64``.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def make(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        half, full = torch.float16, torch.float32
        tensors = {
            "matrix": make(53, 37),
            "scalar": make(),
            "big": make(5003),
            "empty": make(0, 7),
            "matrix_half": make(29, 31, dtype=half),
            "matrix_full": make(41, 43, dtype=full),
            "scalar_full": make(dtype=full),
            "empty_full": make(0, dtype=full),
            "transposed": make(47, 23).t(),
            "transposed_full": make(19, 23, dtype=full).t(),
            "strided": make(2 * 513)[::2],
            "strided_full": make(3 * 211, dtype=full)[::3],
            "channels_last": make(8, 5, 3, 3).to(memory_format=torch.channels_last),
            "sometimes": make(17, 31),
            "sometimes_half": make(301, dtype=half),
            "sometimes_full": make(11, 29, dtype=full),
            "late": make(1500),
            "late_scalar": make(),
            "late_full": make(611, dtype=full),
            "never": make(77),
            "never_full": make(13, dtype=full),
            "expanded": make(67, 9),
            "expanded_full": make(61, dtype=full),
            "wide32": make(23, 17),
            "wide64": make(703),
            "wide64_full": make(97, dtype=full),
            "narrow_full": make(89, dtype=full),
        }
        for name, tensor in tensors.items():
            parameter = torch.nn.Parameter(tensor)
            if name.startswith(("wide", "narrow")):
                parameter.grad_dtype = None
            self.register_parameter(name, parameter)
        self.frozen = torch.nn.Parameter(make(31), requires_grad=False)
        self.tied = torch.nn.Linear(53, 37, bias=False, dtype=torch.bfloat16)
        self.tied.weight = torch.nn.Parameter(make(37, 53))
        self.tied_again = torch.nn.Embedding(37, 53, _weight=self.tied.weight)
        self.tied_again.weight = self.tied.weight


def give_gradients(step: int, *models: torch.nn.Module) -> None:
    """Give every model the same gradients, a function of the step only."""
    for model in models:
        named = list(model.named_parameters())
        generator = torch.Generator().manual_seed(1000 + step)
        values = torch.randn(sum(p.numel() for _, p in named), generator=generator)
        flat = values.split([p.numel() for _, p in named])
        for (name, parameter), gradient in zip(named, flat, strict=True):
            parameter.grad = None
            if parameter.requires_grad and _has_gradient(name, step):
                parameter.grad = _shaped(name, gradient.view(parameter.shape), parameter)


def _has_gradient(name: str, step: int) -> bool:
    missing = (
        step == EMPTY_STEP
        or name.startswith("never")
        or (name.startswith("late") and step < FIRST_LATE_STEP)
        or (name.startswith("sometimes") and step % 3 == 1)
    )
    return not missing


def _shaped(name: str, gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    if name.startswith("narrow"):
        return gradient.bfloat16()
    if name.startswith("wide"):
        return gradient.to(torch.float64 if "64" in name else torch.float32)
    # a copy: what one optimizer does in place, the other must not see
    gradient = gradient.to(parameter.dtype, copy=True)
    if name.startswith("expanded"):
        return gradient.flatten()[0].expand(parameter.shape)
    if name == "matrix":  # dense, but laid out the other way round
        return gradient.t().contiguous().t()
    return gradient


def clip(model: torch.nn.Module, max_norm: float) -> torch.Tensor:
    """Clip as a training loop does; expanded gradients cannot be scaled in place."""
    dense = [
        p
        for name, p in model.named_parameters()
        if p.grad is not None and not name.startswith("expanded")
    ]
    return torch.nn.utils.clip_grad_norm_(dense, max_norm)


def split_groups(
    model: torch.nn.Module, options: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Deal a model's parameters, frozen ones too, out to groups with these options in turn."""
    groups: list[dict[str, Any]] = [{"params": [], **option} for option in options]
    for index, parameter in enumerate(model.parameters()):
        groups[index % len(groups)]["params"].append(parameter)
    return groups


def trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
