"""Train with the optimizer's state on SSD, and with that state as the checkpoint.

optimizer = offload.AdamW(model.parameters(), lr=1e-4, directory="run", model=model)
checkpoint = optimizer.restore()
...
optimizer.step()
optimizer.checkpoint(train_state={"scheduler": scheduler.state_dict()})
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offload.checkpoint import Checkpoint, VerifyReport, open_checkpoint
    from offload.classes import SGD, Adam, AdamW
    from offload.errors import OffloadError
    from offload.listing import CheckpointInfo, list_checkpoints
    from offload.loading import load_parameters
    from offload.optimizer import OffloadedOptimizer
    from offload.options import Options
    from offload.pinning import pin, unpin
    from offload.process_groups import SEPARATE
    from offload.retention import BestBy, EverySeconds, EverySteps, LastK, Retention
    from offload.scaling import GradScaler
    from offload.seal import SealHandle
    from offload.stats import Stats

if not sys.platform.startswith("linux"):
    importlib.import_module("gds")  # says what is needed, and goes no further

__version__ = "0.1.0.dev0"

__all__ = [
    "SEPARATE",
    "SGD",
    "Adam",
    "AdamW",
    "BestBy",
    "Checkpoint",
    "CheckpointInfo",
    "EverySeconds",
    "EverySteps",
    "GradScaler",
    "LastK",
    "OffloadError",
    "OffloadedOptimizer",
    "Options",
    "Retention",
    "SealHandle",
    "Stats",
    "VerifyReport",
    "list_checkpoints",
    "load_parameters",
    "open_checkpoint",
    "pin",
    "unpin",
]

_MODULES = {
    "offload.checkpoint": ("Checkpoint", "VerifyReport", "open_checkpoint"),
    "offload.classes": ("SGD", "Adam", "AdamW"),
    "offload.errors": ("OffloadError",),
    "offload.listing": ("CheckpointInfo", "list_checkpoints"),
    "offload.loading": ("load_parameters",),
    "offload.optimizer": ("OffloadedOptimizer",),
    "offload.options": ("Options",),
    "offload.pinning": ("pin", "unpin"),
    "offload.process_groups": ("SEPARATE",),
    "offload.retention": ("BestBy", "EverySeconds", "EverySteps", "LastK", "Retention"),
    "offload.scaling": ("GradScaler",),
    "offload.seal": ("SealHandle",),
    "offload.stats": ("Stats",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    # Importing torch takes seconds; `offload ls` needs none of it. This is the only lazy place.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
