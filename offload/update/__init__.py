"""The arithmetic of a chunk: update rules, the code that runs them, and encodings of stored state.

This wing may know torch, `device` and `format`. It knows nothing of files, of stores or of the
ring.
"""

from offload.update.decoder import StateDecoder
from offload.update.device_updater import DeviceUpdater
from offload.update.dtypes import DTYPE_CODES, DTYPES
from offload.update.filler import StateFiller
from offload.update.pool import UpdatePool
from offload.update.rules import Scalars, UpdateRule
from offload.update.step_inputs import StepInputs
from offload.update.updater import ChunkUpdater

__all__ = [
    "DTYPES",
    "DTYPE_CODES",
    "ChunkUpdater",
    "DeviceUpdater",
    "Scalars",
    "StateDecoder",
    "StateFiller",
    "StepInputs",
    "UpdatePool",
    "UpdateRule",
]
