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
from offload.checkpoint.owner_parts import check_cover
from offload.format.manifest import Manifest
from offload.format.shares.part_table import OwnerTable
from offload.store.owners.slot import OwnerSlot
from offload.store.owners.store import OwnerStore
from offload.store.slot import Slot
from offload.store.store import Store
from offload.tiers.catalog import TierCopy, read_tables
from offload.tiers.marker import Marker
from offload.tiers.model_objects import model_object, shard_object
from offload.tiers.ranks.filling_shares import (
    Share,
    SharesDownload,
    publish,
    reserve_part,
    reserve_slot,
    seal_part,
)
from offload.tiers.sending import Progress
from offload.tiers.services.objects import Objects


class _Owner(NamedTuple):
    """An owner besides the first: its parts, the one that is filled, and what that will hold."""

    store: OwnerStore
    table: OwnerTable
    part: OwnerSlot
    share: Share


class OwnersDownload:
    """Download of a checkpoint of several ranks.

    Args:
        objects: Objects of the tier.
        copy: Copy to fetch.
        marker: Marker of the copy.
        manifest: Manifest of the checkpoint.
        backend: Storage backend of the store.
        num_transfers: Number of transfers at a time.
        progress: Function that is called with the bytes done and the total.

    Raises:
        DamagedError: A table is missing, or is another one than was sent.
        CheckpointError: The owners do not have each element of the checkpoint once.
        TierError: A table cannot be read.
    """

    def __init__(
        self,
        objects: Objects,
        copy: TierCopy,
        marker: Marker,
        manifest: Manifest,
        backend: Backend,
        num_transfers: int,
        progress: Progress | None,
    ) -> None:
        self._manifest = manifest
        self._tables = read_tables(objects, copy, manifest)
        check_cover(copy.url, manifest, self._tables)
        self._backend = backend
        self._download = SharesDownload(
            objects, copy, marker, manifest, backend, num_transfers, progress
        )

    @property
    def bytes_fetched(self) -> int:
        """Number of bytes fetched from the tier."""
        return self._download.bytes_fetched

    @property
    def bytes_kept(self) -> int:
        """Number of bytes that the store held already."""
        return self._download.bytes_kept

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
                self._download.fill([share, *(one.share for one in owners)])
                train_state = self._download.train_state(slot)
                return self._publish(store, slot, owners, train_state)
            except BaseException:
                self._download.end()
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
    path = os.path.abspath(os.fspath(directory))
    return {reference.owner: path for reference in manifest.owners}
