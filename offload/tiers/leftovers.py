"""Removal of what failed uploads of a store have left in a tier, and of their records.

An upload that has failed goes on with the next attempt, as long as the store has its checkpoint.
When the checkpoint is gone, nobody needs what was sent. Parameters stay until there are newer ones.
Only uploads with a record in this store are touched, and none that is running: it holds the lock of
its record.
"""

from __future__ import annotations

import os
from contextlib import suppress

from gds import Backend, StorageError
from offload.checkpoint.listing import list_checkpoints
from offload.errors import OffloadError, TierError
from offload.tiers.catalog import copy_of
from offload.tiers.ledger import UploadKey, UploadRecord, claimed, records_in
from offload.tiers.marker import Identity
from offload.tiers.pruning import remove_copy
from offload.tiers.services.objects import Objects

_MOST = 4
"""Most records that are looked at at a time: an upload does not wait long for them."""

_MOST_RECORDS = 32
"""Most records without a checkpoint that are kept, if the tier refuses to remove objects."""


def clear_leftovers(
    objects: Objects, store: str, key: UploadKey, backend: Backend, newest: int = 0
) -> None:
    """Remove leftovers of earlier uploads, a few at a time. Errors leave them there."""
    with suppress(OSError, StorageError, OffloadError):
        records = [one for one in records_in(store, key) if one.generation != key.generation]
        if not records:
            return
        checkpoints = list_checkpoints(store, backend=backend)
        if not all(one.valid for one in checkpoints):
            return  # whose checkpoint a record is of is not known
        present = {one.generation for one in checkpoints}
        dead = [one for one in records if one.generation not in present]
        older = [one for one in records if one.generation < newest and one not in dead]
        for old in dead[:-_MOST_RECORDS]:
            os.remove(old.path)
        for one in dead[-_MOST_RECORDS:][:_MOST] + older[:_MOST_RECORDS]:
            with suppress(TierError), claimed(backend, one.path) as is_free:
                if is_free and _is_cleared(objects, key.store_id, one, newest, one in dead):
                    os.remove(one.path)


def _is_cleared(
    objects: Objects, store_id: str, record: UploadRecord, newest: int, is_dead: bool
) -> bool:
    """Remove what an upload has sent, if nobody needs it; return whether its record may go."""
    copy = copy_of(objects, Identity(store_id, record.generation, record.writer))
    if copy is None or copy.marker is not None:
        return is_dead or copy is not None
    if record.generation >= newest if copy.parameters is not None else not is_dead:
        return False
    remove_copy(objects, copy)
    return True
