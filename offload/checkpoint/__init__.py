"""Readers of sealed checkpoints: find, check, open, verify, list.

This wing may know `format`, `retention`, and how `gds` reads and takes shared locks. It never opens
a file for writing, and never imports torch when it is imported.
"""

from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.listing import CheckpointInfo, list_checkpoints
from offload.checkpoint.opening import open_checkpoint, open_for_parameters
from offload.checkpoint.verify import VerifyReport

__all__ = [
    "Checkpoint",
    "CheckpointInfo",
    "VerifyReport",
    "list_checkpoints",
    "open_checkpoint",
    "open_for_parameters",
]
