"""The arithmetic of a chunk: update rules, the code that runs them, and encodings of stored state.

`updaters` makes the updater of a step, and is the place to begin reading: the order of a chunk's
update is in `updater`, and the places where chunks are updated are `host_place` and `device_place`.
Elements are stepped by three implementations of one protocol, which do not know of each other:
`torch_step`, `kernel.kernel_step` and `device_step`.

This wing may know torch, `device` and `format`. It knows nothing of files, of stores or of the
ring.
"""

from offload.update.coding.decoder import StateDecoder
from offload.update.coding.filler import StateFiller
from offload.update.dtypes import DTYPE_CODES, DTYPES
from offload.update.kept_state import Scalars
from offload.update.pool import UpdatePool
from offload.update.rules import UpdateRule
from offload.update.step_inputs import StepInputs
from offload.update.updaters import device_updater, host_updater

__all__ = [
    "DTYPES",
    "DTYPE_CODES",
    "Scalars",
    "StateDecoder",
    "StateFiller",
    "StepInputs",
    "UpdatePool",
    "UpdateRule",
    "device_updater",
    "host_updater",
]
