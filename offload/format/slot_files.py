"""Files of a slot, and of its parts on further drives, with their sizes."""

from __future__ import annotations

from collections.abc import Sequence

from offload.format.layout import Layout
from offload.format.manifest import reserved_bytes
from offload.format.names import MANIFEST_NAME, TRAIN_STATE_NAME


def slot_sizes(
    layout: Layout, num_groups: int, *, train_state_bytes: int, owners: Sequence[str] = ()
) -> dict[str, int]:
    """Return the size in bytes of every file of a slot, by name.

    Args:
        layout: Layout of the slot.
        num_groups: Number of parameter groups, which the manifest holds.
        train_state_bytes: Bytes reserved for the train state.
        owners: For each owner but the first, the store's directory on its node; see
            `offload.format.manifest.reserved_bytes`.
    """
    return {
        **layout.file_sizes(),
        TRAIN_STATE_NAME: train_state_bytes,
        MANIFEST_NAME: reserved_bytes(layout, num_groups, owners),
    }
