"""Import and export of state dicts and checkpoints in the formats of torch and Hugging Face.

This wing may know `stream`, `update`, `store`, `checkpoint`, `model`, `retention` and `options`. It
never imports `engine` or the optimizer.
"""

from offload.exchange.exporting import export_checkpoint
from offload.exchange.importing import import_checkpoint
from offload.exchange.state_boxes import read_state

__all__ = [
    "export_checkpoint",
    "import_checkpoint",
    "read_state",
]
