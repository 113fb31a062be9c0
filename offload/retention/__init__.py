"""The choice of checkpoints that a store keeps: policies, and pins that users have named.

This wing may know `format` and the files of `gds`. It never imports torch, nor a wing above it.
"""

from offload.retention.pins import Pin, read_pins
from offload.retention.policy import (
    BestBy,
    EverySeconds,
    EverySteps,
    LastK,
    ParametersOnly,
    Retention,
    as_retention,
)

__all__ = [
    "BestBy",
    "EverySeconds",
    "EverySteps",
    "LastK",
    "ParametersOnly",
    "Pin",
    "Retention",
    "as_retention",
    "read_pins",
]
