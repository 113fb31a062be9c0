"""A step that runs beside the model: hooks, the order of chunks, and the pass in the background.

This wing may know `engine` and every wing below it. It never imports the optimizer or
`integrations`. Its modules are imported only on demand, since they need torch's compiler, which
takes seconds to import.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from offload.engine.stepping import StepStrategy
from offload.engine.training_state import TrainingState
from offload.options import Overlap

__all__ = ["require_possible", "strategy_for"]


def require_possible(overlap: Overlap, model: torch.nn.Module | None, *, several: bool) -> None:
    """Check that steps can overlap with this model.

    Args:
        overlap: Part of the model's work that steps run beside.
        model: The module that is called in training; None if the user has not given it.
        several: Whether several ranks train the model.

    Raises:
        ValueError: There is no model, or the ranks average gradients after they were applied.
        OverlapError: The model cannot have hooks.
    """
    if model is None:
        raise ValueError(
            f"overlap={overlap!r} needs model=, the module that is called in training: "
            "pass the one whose parameters() you gave"
        )
    from offload.overlap.compiling import require_hookable

    require_hookable(model)
    if several and overlap == "backward":
        raise ValueError(
            'overlap="backward" is not supported with several ranks. It steps each '
            "parameter with the gradient of this rank alone, before it has been averaged with "
            'those of the others. Use Options(overlap="forward"), or leave it out'
        )


def strategy_for(
    overlap: Overlap | None, model: torch.nn.Module | None
) -> Callable[[TrainingState], StepStrategy]:
    """Return what makes the strategy of an optimizer's steps."""
    if overlap is None or model is None:
        return StepStrategy
    if overlap == "forward":
        from offload.overlap.forward import BesideForward

        return partial(BesideForward, model=model)
    from offload.overlap.backward import DuringBackward

    return partial(DuringBackward, model=model)
