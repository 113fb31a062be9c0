"""Inputs of one step, for the updaters of the CPU and of a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from offload.format.layout import Layout
from offload.update.kept_state import Scalars


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepInputs:
    """The tensors, hyper-parameters and numbers that one step computes with.

    Sequences of parameters, gradients and scalars have one item for each parameter of the layout,
    in element-space order. An updater does not keep this object, so that a gradient's memory is
    free as soon as it has been applied.
    """

    layout: Layout
    """Place of every parameter in the state arrays."""

    groups: Sequence[Mapping[str, Any]]
    """``param_groups`` at this step."""

    parameters: Sequence[torch.Tensor]
    """Live parameters, updated in place."""

    gradients: Sequence[torch.Tensor | None]
    """Gradient of each parameter, of any floating-point dtype; None if it has none."""

    scalars: Sequence[Scalars | None]
    """Scalar state of each parameter; None for a parameter that has no state yet."""

    step: int
    """Number of this step, from 1."""

    seed: int = 0
    """Seed of stochastic rounding, if state is stored with it."""

    factors: Sequence[float] = ()
    """Factors that each gradient is multiplied by in turn, in FP32."""
