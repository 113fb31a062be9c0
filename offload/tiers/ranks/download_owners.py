"""Download of a checkpoint that several ranks made: all of it, into a store of owners on one host.

Each owner gets its part back as it was sealed. So ranks continue from the checkpoint as from one of
their own, with as many ranks as made it or with another number.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import NamedTuple

from gds import Backend
from offload.format.manifest import Manifest
from offload.format.names import TRAIN_STATE_NAME
from offload.format.shares.part_table import OwnerTable
from offload.store.owners.slot import OwnerSlot
from offload.store.owners.store import OwnerStore
from offload.store.slots.slot import Slot
from offload.store.store import Store
from offload.tiers.marker import Marker
from offload.tiers.model_objects import model_object, shard_object
from offload.tiers.range_filling import RangeFilling
from offload.tiers.ranks.filling_shares import (
    Share,
    fill_shares,
    publish,
    reserve_part,
    reserve_slot,
    seal_part,
)


class _Owner(NamedTuple):
    """An owner besides the first: its parts, the one that is filled, and what that will hold."""

    store: OwnerStore
    table: OwnerTable
    part: OwnerSlot
    share: Share


class OwnersDownload:
    """Download of a checkpoint of several ranks.

    Args:
        filling: Fetches ranges of the copy.
        tables: Tables of the owners besides the first.
        marker: Marker of the copy.
        manifest: Manifest of the checkpoint.
        backend: Storage backend of the store.
    """

    def __init__(
        self,
        filling: RangeFilling,
        tables: Sequence[OwnerTable],
        marker: Marker,
        manifest: Manifest,
        backend: Backend,
    ) -> None:
        self._filling = filling
        self._tables = tables
        self._marker = marker
        self._manifest = manifest
        self._backend = backend
        filling.expect(marker.sizes[TRAIN_STATE_NAME])

    def run(self, store: Store, *, allow_volatile: bool, allow_remote: bool) -> str:
        """Fill a slot and a part for each owner, and publish them as one checkpoint.

        Args:
            store: Store of the first directory, which has been told of its owners.
            allow_volatile: Accept a file system that loses its content at power-off.
            allow_remote: Accept a file system that another machine or a program serves.

        Returns:
            Path of the checkpoint.

        The errors are those of `offload.tiers.download.pull`.
        """
        manifest = self._manifest
        with ExitStack() as resources:
            slot, share = reserve_slot(store, manifest, model_object(manifest, self._tables))
            try:
                owners = [
                    self._open(resources, store, table, allow_volatile, allow_remote)
                    for table in self._tables
                ]
                train_state = self._filling.train_state(self._marker, slot.train_state.size_bytes)
                shares = [share, *(one.share for one in owners)]
                fill_shares(self._filling, shares, self._marker.object_bytes)
                return self._publish(store, slot, owners, train_state)
            except BaseException:
                self._filling.end()
                if store.checkpoint_of(slot) is None:
                    store.release(slot)
                raise

    def _open(
        self,
        resources: ExitStack,
        store: Store,
        table: OwnerTable,
        allow_volatile: bool,
        allow_remote: bool,
    ) -> _Owner:
        """Reserve the part of an owner."""
        opened = resources.enter_context(
            closing(
                OwnerStore(
                    self._backend,
                    store.directory,
                    table.owner,
                    store_id=self._manifest.store_id,
                    allow_volatile=allow_volatile,
                    allow_remote=allow_remote,
                )
            )
        )
        part, share = reserve_part(opened, table, shard_object(table), store.named_parts())
        return _Owner(opened, table, part, share)

    def _publish(
        self, store: Store, slot: Slot, owners: Sequence[_Owner], train_state: bytes
    ) -> str:
        """Make everything durable, the parts of the owners first, and publish the checkpoint."""
        references = [
            seal_part(one.store, one.part, one.table, expected)
            for one, expected in zip(owners, self._manifest.owners, strict=True)
        ]
        stored = publish(store, slot, self._manifest, references, train_state)
        for one in owners:
            one.store.published(one.part)
        return stored.path


def owners_in(manifest: Manifest, directory: str | os.PathLike[str]) -> dict[int, str]:
    """Return the directory of each owner besides the first, if all are in one directory."""
    path = os.path.abspath(os.fsdecode(directory))
    return {reference.owner: path for reference in manifest.owners}
