"""The only writer of a store: slots and parts, sealing and withdrawal of checkpoints, recycling.

This wing may know `checkpoint`, `retention`, `format` and `gds`. It never imports torch, nor a wing
above it.
"""

from offload.store.opening import StoredCheckpoint
from offload.store.pinning import pin, unpin
from offload.store.pruning import PruneReport, prune
from offload.store.quarantine import verify_and_mark
from offload.store.slots.slot import Slot
from offload.store.store import Store
from offload.store.store_errors import Poison

__all__ = [
    "Poison",
    "PruneReport",
    "Slot",
    "Store",
    "StoredCheckpoint",
    "pin",
    "prune",
    "unpin",
    "verify_and_mark",
]
