"""Coordination of an optimizer's work: steps, seals, restores, state dicts, and closing.

This wing may know every wing below it. It never imports `overlap`, the optimizer, `integrations` or
`cli`.
"""

from offload.engine.engine import Engine
from offload.engine.reference import Position, is_reference, read_reference
from offload.engine.seal_handle import SealHandle
from offload.engine.stats import Stats
from offload.engine.stepping import StepStrategy
from offload.engine.training_state import TrainingState

__all__ = [
    "Engine",
    "Position",
    "SealHandle",
    "Stats",
    "StepStrategy",
    "TrainingState",
    "is_reference",
    "read_reference",
]
