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

from offload.interactive import names_to_offer

if TYPE_CHECKING:
    from offload.checkpoint.checkpoint import Checkpoint, VerifyReport
    from offload.checkpoint.listing import CheckpointInfo, list_checkpoints
    from offload.checkpoint.opening import open_checkpoint
    from offload.classes import SGD, Adam, AdamW
    from offload.engine.reference import Position, reference_of
    from offload.engine.seal_handle import SealHandle
    from offload.engine.stats import Stats
    from offload.errors import (
        BrokenOptimizerError,
        CheckpointError,
        CheckpointNotFoundError,
        DamagedError,
        InDoubtError,
        ManifestError,
        MetricError,
        MismatchError,
        NearError,
        NotRestoredError,
        OffloadError,
        OverlapError,
        PinError,
        ProcessGroupError,
        RanksError,
        RecycledError,
        RemoteStoreError,
        SealError,
        SizingError,
        SlotFullError,
        StorageError,
        StoreBusyError,
        StoreError,
        StoreFullError,
        StoreLockedError,
        TierAccessError,
        TierError,
        TierNotFoundError,
        TierUnavailableError,
        TrainStateTooLargeError,
        TrainStateTypeError,
        UnreadableError,
        UnreliableReadError,
        UnsupportedOptimizerError,
        UnsupportedParameterError,
        UnwritableError,
        VolatileStoreError,
    )
    from offload.exchange.dcp_storage import CheckpointReader
    from offload.exchange.exporting import export_checkpoint
    from offload.exchange.hf_files import add_hf_files
    from offload.exchange.importing import import_checkpoint
    from offload.exchange.state_boxes import read_state
    from offload.format.metrics import usable_metrics
    from offload.grad_scaler import GradScaler
    from offload.model.loading import load_parameters
    from offload.model.outside import outside_memory
    from offload.model.process_groups import SEPARATE
    from offload.optimizer import OffloadedOptimizer
    from offload.options import DriveTuning, MemoryDirectory, Options, Tier
    from offload.retention.policy import (
        BestBy,
        EverySeconds,
        EverySteps,
        LastK,
        ParametersOnly,
        Retention,
    )
    from offload.sizing.plan import size
    from offload.store.pinning import pin, unpin
    from offload.store.quarantine import verify_and_mark, verify_before_resume

if not sys.platform.startswith("linux"):
    importlib.import_module("gds")  # raises, and says which platform is needed

__version__ = "0.1.0"

__all__ = [
    "SEPARATE",
    "SGD",
    "Adam",
    "AdamW",
    "BestBy",
    "BrokenOptimizerError",
    "Checkpoint",
    "CheckpointError",
    "CheckpointInfo",
    "CheckpointNotFoundError",
    "CheckpointReader",
    "DamagedError",
    "DriveTuning",
    "EverySeconds",
    "EverySteps",
    "GradScaler",
    "InDoubtError",
    "LastK",
    "ManifestError",
    "MemoryDirectory",
    "MetricError",
    "MismatchError",
    "NearError",
    "NotRestoredError",
    "OffloadError",
    "OffloadedOptimizer",
    "Options",
    "OverlapError",
    "ParametersOnly",
    "PinError",
    "Position",
    "ProcessGroupError",
    "RanksError",
    "RecycledError",
    "RemoteStoreError",
    "Retention",
    "SealError",
    "SealHandle",
    "SizingError",
    "SlotFullError",
    "Stats",
    "StorageError",
    "StoreBusyError",
    "StoreError",
    "StoreFullError",
    "StoreLockedError",
    "Tier",
    "TierAccessError",
    "TierError",
    "TierNotFoundError",
    "TierUnavailableError",
    "TrainStateTooLargeError",
    "TrainStateTypeError",
    "UnreadableError",
    "UnreliableReadError",
    "UnsupportedOptimizerError",
    "UnsupportedParameterError",
    "UnwritableError",
    "VerifyReport",
    "VolatileStoreError",
    "add_hf_files",
    "export_checkpoint",
    "import_checkpoint",
    "list_checkpoints",
    "load_parameters",
    "open_checkpoint",
    "outside_memory",
    "pin",
    "read_state",
    "reference_of",
    "size",
    "unpin",
    "usable_metrics",
    "verify_and_mark",
    "verify_before_resume",
]

_MODULES = {
    "offload.checkpoint.checkpoint": ("Checkpoint", "VerifyReport"),
    "offload.checkpoint.opening": ("open_checkpoint",),
    "offload.classes": ("SGD", "Adam", "AdamW"),
    "offload.errors": (
        "BrokenOptimizerError",
        "CheckpointError",
        "CheckpointNotFoundError",
        "DamagedError",
        "InDoubtError",
        "ManifestError",
        "MetricError",
        "MismatchError",
        "NearError",
        "NotRestoredError",
        "OffloadError",
        "OverlapError",
        "PinError",
        "ProcessGroupError",
        "RanksError",
        "RecycledError",
        "RemoteStoreError",
        "SealError",
        "SizingError",
        "SlotFullError",
        "StorageError",
        "StoreBusyError",
        "StoreError",
        "StoreFullError",
        "StoreLockedError",
        "TierAccessError",
        "TierError",
        "TierNotFoundError",
        "TierUnavailableError",
        "TrainStateTooLargeError",
        "TrainStateTypeError",
        "UnreadableError",
        "UnreliableReadError",
        "UnsupportedOptimizerError",
        "UnsupportedParameterError",
        "UnwritableError",
        "VolatileStoreError",
    ),
    "offload.engine.reference": ("Position", "reference_of"),
    "offload.format.metrics": ("usable_metrics",),
    "offload.checkpoint.listing": ("CheckpointInfo", "list_checkpoints"),
    "offload.model.loading": ("load_parameters",),
    "offload.optimizer": ("OffloadedOptimizer",),
    "offload.options": ("DriveTuning", "MemoryDirectory", "Options", "Tier"),
    "offload.store.pinning": ("pin", "unpin"),
    "offload.model.outside": ("outside_memory",),
    "offload.model.process_groups": ("SEPARATE",),
    "offload.store.quarantine": ("verify_and_mark", "verify_before_resume"),
    "offload.retention.policy": (
        "BestBy",
        "EverySeconds",
        "EverySteps",
        "LastK",
        "ParametersOnly",
        "Retention",
    ),
    "offload.grad_scaler": ("GradScaler",),
    "offload.engine.seal_handle": ("SealHandle",),
    "offload.exchange.dcp_storage": ("CheckpointReader",),
    "offload.exchange.exporting": ("export_checkpoint",),
    "offload.exchange.hf_files": ("add_hf_files",),
    "offload.exchange.importing": ("import_checkpoint",),
    "offload.exchange.state_boxes": ("read_state",),
    "offload.engine.stats": ("Stats",),
    "offload.sizing.plan": ("size",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    # Importing torch takes seconds, and `offload ls` does not need it. Only this module is lazy.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    # What this module has imported for itself is not offered.
    return names_to_offer([*(name for name in globals() if name.startswith("__")), *__all__])
