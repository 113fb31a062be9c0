"""Sizes of a training run before the hardware is bought: disk, time, intervals, drive life.

This wing may know `format`, and `checkpoint` to read a store. It is arithmetic: it never imports
torch, and never writes.
"""

from offload.errors import SizingError
from offload.sizing.figures import Plan
from offload.sizing.inputs import Cluster, Machine, Run, measured_drives
from offload.sizing.plan import size
from offload.sizing.state import Precision

__all__ = [
    "Cluster",
    "Machine",
    "Plan",
    "Precision",
    "Run",
    "SizingError",
    "measured_drives",
    "size",
]
