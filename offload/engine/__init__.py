"""Coordination of an optimizer's work: steps, seals, restores, state dicts, and closing.

This wing may know every wing below it. It never imports `overlap`, the optimizer, `integrations` or
`cli`.
"""

from offload.engine.chunk_pass import StatePass
from offload.engine.engine import Engine
from offload.engine.reference import Position, is_reference, read_reference
from offload.engine.seal import SealHandle
from offload.engine.state_dict import ExchangingEngine
from offload.engine.stats import Stats

__all__ = [
    "Engine",
    "ExchangingEngine",
    "Position",
    "SealHandle",
    "StatePass",
    "Stats",
    "is_reference",
    "read_reference",
]
