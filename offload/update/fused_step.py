"""Torch's fused step, with results that do not depend on where a tensor is cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from offload.update.kept_state import Scalars, write_scalars
from offload.update.pool import BlockContext
from offload.update.rules import FUSED_MULTIPLE


def step_fused(
    context: BlockContext,
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    views: Mapping[str, torch.Tensor],
    scalars: Scalars,
    group: Mapping[str, Any],
) -> dict[str, Any]:
    """Run torch's fused step in whole vectors, so that the cuts between blocks do not matter."""
    length = len(parameter)
    rest = length % FUSED_MULTIPLE
    if not rest and _is_plain(parameter) and _is_plain(gradient):
        state = {**views, **write_scalars(scalars)}
        return context.stepper.apply(parameter, gradient, state, group)

    def padded(name: str, values: torch.Tensor) -> torch.Tensor:
        """Return a copy of values that is a multiple of a vector long, with zeros at the end."""
        out = context.buffer(f"padded {name}", torch.float32, length + FUSED_MULTIPLE - rest)
        out[:length] = values
        out[length:] = 0
        return out

    stepped = padded("parameter", parameter).view(-1)
    arrays = {name: padded(name, view) for name, view in views.items()}
    state = {**arrays, **write_scalars(scalars)}
    context.stepper.apply(stepped, padded("gradient", gradient), state, group)
    parameter.copy_(stepped[:length])
    for name, view in views.items():
        view.copy_(arrays[name][:length])
    return {**state, **views}


def _is_plain(values: torch.Tensor) -> bool:
    """Return whether values are in memory end to end; torch's fused code supposes it, unchecked."""
    return values.is_contiguous() and not (values.is_neg() or values._is_zerotensor())
