"""The arithmetic of a chunk: update rules, the code that runs them, and encodings of stored state.

`updater` is where to begin reading: it has the order of a chunk's update, in host memory or on a
device, and chooses the code that steps elements. There are three
implementations of that code, which do not know of each other: `torch_step`, `kernel.kernel_step`
and `device_step`.

This wing may know torch, `device` and `format`. It knows nothing of files, of stores or of the
ring.
"""

from offload.update.coding.decoder import StateDecoder
from offload.update.coding.filler import StateFiller
from offload.update.dtypes import DTYPE_CODES, DTYPES
from offload.update.kept_state import Scalars
from offload.update.pool import UpdatePool
from offload.update.rules import UpdateRule
from offload.update.step_keys import StepInputs
from offload.update.updater import DeviceUpdater, HostUpdater

__all__ = [
    "DTYPES",
    "DTYPE_CODES",
    "DeviceUpdater",
    "HostUpdater",
    "Scalars",
    "StateDecoder",
    "StateFiller",
    "StepInputs",
    "UpdatePool",
    "UpdateRule",
]
