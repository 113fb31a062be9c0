"""Sealed parts that no checkpoint names, as pruning reports them.

Usually a user has removed a checkpoint by hand and has forgotten its parts on further drives. But
the parts may also belong to the store that this one is a copy of. Therefore only a process that
trains in the store rewrites them; pruning leaves them alone.
"""

from __future__ import annotations

import errno

from offload.errors import StoreError
from offload.format.manifest import Manifest
from offload.store.slots.part_pool import PartLeftovers

_REASON = (
    "it is sealed for this store, but no checkpoint here names it. If one was removed by hand, "
    "remove this part as well; training in this store uses it again"
)


def left_alone(
    parts: PartLeftovers, newest: Manifest | None, directory: str
) -> tuple[tuple[str, str], ...]:
    """Return the paths of unnamed parts, each with the reason why it is left alone.

    Args:
        parts: Parts that were found on the further drives.
        newest: Newest manifest in the store, counting those of unusable checkpoints; None if there
            is no manifest.
        directory: The store's first directory.

    Raises:
        StoreError: A part is newer than all checkpoints. The part's directory therefore probably
            belongs to another store, whose checkpoints must not be withdrawn from here.
    """
    for path, generation in parts.generations.items():
        if newest is not None and generation > newest.generation:
            raise StoreError(
                errno.EINVAL,
                f"this part is of generation {generation}, and the newest checkpoint in "
                f"{directory} is of generation {newest.generation}. If {directory} is a copy, "
                "this is a directory of the original, which has been trained further: pass --part "
                "with the copy's own directories. If this is the right directory, a newer "
                "checkpoint was removed by hand, or was never finished: then remove this part as "
                "well. Nothing has been changed",
                path,
            )
    return tuple((path, _REASON) for path in parts.unnamed)
