"""What a run leaves for people while it goes on: its present status, and its history.

This wing may know `gds.waiting`, `errors`, `journal` and `format`, and neither torch nor the
engine: it is given a function that says what to record. Nothing that a store needs depends on its
two files, which are never synced, and may be removed at any time.
"""

from offload.record.history import read_lines
from offload.record.recorder import Look, Recorder
from offload.record.status import read_status

__all__ = ["Look", "Recorder", "read_lines", "read_status"]
