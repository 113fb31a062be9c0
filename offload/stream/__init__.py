"""Memory and motion: chunks of state on their way from the drives through the ring and back.

This wing may know `model`, `update`, `device`, `store.slots`, `format`, `options` and `gds`. It
never imports `engine` or `exchange`.
"""

from offload.stream.drives import Directory, Drives, as_directories
from offload.stream.frame import Frame, HostFrames
from offload.stream.memory import WorkingMemory
from offload.stream.meter import Meter, Trace
from offload.stream.passes import check_state
from offload.stream.streamer import Streamer

__all__ = [
    "Directory",
    "Drives",
    "Frame",
    "HostFrames",
    "Meter",
    "Streamer",
    "Trace",
    "WorkingMemory",
    "as_directories",
    "check_state",
]
