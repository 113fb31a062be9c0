"""What one rank fetches of a checkpoint of several ranks, when they restore from a tier.

The writer finds the checkpoint, and all ranks open the copy that it names. Each reserves room for
the share of the owner that it serves, and fetches it. Every rank but the writer makes its part
durable, and then the writer publishes the checkpoint. Until that rename there is none, so a rank
that is killed leaves a slot or a part, from which the next restore goes on. The ranks agree after
each of these steps; see `offload.engine.rank_arrival`.
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace

from gds import Backend, StorageError
from offload.checkpoint.owner_parts import check_cover
from offload.errors import CheckpointError, TierError
from offload.format.manifest import Manifest
from offload.format.shares.owners import OwnerReference
from offload.format.shares.part_table import OwnerTable
from offload.store.opening import StoredCheckpoint
from offload.store.owners.claims import NamedParts
from offload.store.owners.slot import OwnerSlot, OwnerSlotState
from offload.store.owners.store import OwnerStore
from offload.store.slots.slot import Slot
from offload.store.store import Store
from offload.tiers.catalog import find_copy, list_copies, read_manifest, read_table, read_tables
from offload.tiers.model_objects import model_object, shard_object
from offload.tiers.range_filling import GoingOn, RangeFilling
from offload.tiers.ranks.filling_shares import (
    Share,
    fill_shares,
    publish,
    reserve_part,
    reserve_slot,
    seal_part,
)
from offload.tiers.sending import NUM_TRANSFERS
from offload.tiers.services.address import parse_address
from offload.tiers.services.opening import DEFAULT_RETRY_S, DEFAULT_TIMEOUT_S, open_objects


def find_newest(url: str) -> tuple[str, str]:
    """Return the URL of the newest complete copy of a tier; empty if the tier has no complete one.

    Args:
        url: URL of the tier, of a store in it, or of one copy.

    Returns:
        The URL; and if there are copies, of which none is complete, a sentence that says so.

    Raises:
        TierError: The tier cannot be read, or has copies of several stores.
    """
    address = parse_address(url)
    with open_objects(address, timeout_s=DEFAULT_TIMEOUT_S, retry_s=DEFAULT_RETRY_S) as objects:
        copies = list_copies(objects, address)
        if any(copy.marker is not None for copy in copies):
            return find_copy(objects, address).url, ""
    if not copies:
        return "", ""
    return "", (
        f"{url}: no complete copy of a checkpoint, so training starts from the beginning "
        f"({copies[-1].url}: {copies[-1].reason})"
    )


class ArrivingShare:
    """The share of one rank in a checkpoint that arrives from a tier.

    The calls are `reserve`, `fetch_train_state`, `fetch`, `seal_part`, `tell_reference`, `publish`
    and `published`; those that concern only the writer, or only the other ranks, do nothing on the
    rest. `close` ends it, at any time.

    Args:
        url: URL of the copy, the same on all ranks.
        backend: Storage backend of the store.
        owner: Owner that this rank serves; 0 on the writer.
        owners: Owners that all ranks serve.

    Raises:
        CheckpointError: Other ranks than the present ones made the checkpoint, or its owners do not
            have each element of it once.
        DamagedError: The manifest or a table is missing, or is not the one that was sent.
        TierError: The tier cannot be used.
    """

    def __init__(self, url: str, backend: Backend, owner: int, owners: Collection[int]) -> None:
        self.url = url
        """URL of the copy."""
        self._slot: Slot | None = None
        self._part: OwnerSlot | None = None
        self._share: Share | None = None
        self._served: Store | OwnerStore | None = None
        self._train_state = b""
        self._sealed: OwnerReference | None = None
        self._is_told = False
        """Whether the writer may know the reference to the part of this rank, and publish it."""
        address = parse_address(url)
        with ExitStack() as opened:
            objects = opened.enter_context(
                open_objects(address, timeout_s=DEFAULT_TIMEOUT_S, retry_s=DEFAULT_RETRY_S)
            )
            copy = find_copy(objects, address)
            if copy.marker is None:
                raise TierError(errno.EINVAL, copy.reason, url)
            manifest = read_manifest(objects, copy)
            _require_same_owners(url, manifest, owners)
            self.manifest = manifest
            """Manifest of the checkpoint, as it was sent."""
            self._reference: OwnerReference | None = None
            self._table: OwnerTable | None = None
            if owner:
                self._reference = next(one for one in manifest.owners if one.owner == owner)
                self._table = read_table(objects, copy, manifest, self._reference)
                self._model = shard_object(self._table)
            else:
                tables = read_tables(objects, copy, manifest)
                if tables:
                    check_cover(url, manifest, tables)
                self._model = model_object(manifest, tables)
            self._marker = copy.marker
            self._filling = RangeFilling(objects, copy, manifest, backend, NUM_TRANSFERS)
            self._resources = opened.pop_all()

    @property
    def own_manifest(self) -> Manifest:
        """The manifest, with the layout and the scalar state of this rank's share."""
        table = self._table
        if table is None:
            return self.manifest
        return replace(
            self.manifest,
            layout=table.layout,
            scalars=table.scalars,
            digests=table.digests,
            model_boxes=table.model_boxes,
        )

    @property
    def bytes_fetched(self) -> int:
        """Number of bytes that this rank has fetched from the tier."""
        return self._filling.bytes_fetched

    @property
    def bytes_kept(self) -> int:
        """Number of bytes that an earlier download had left."""
        return self._filling.bytes_kept

    def reserve(self, served: Store | OwnerStore) -> None:
        """Make the store one of this checkpoint's, and reserve room for the share of this rank.

        Args:
            served: What this rank serves: the store on the writer, else the parts of its owner.

        Raises:
            StoreError: The store has checkpoints.
            StoreFullError: There is no room. Nothing was fetched.
        """
        manifest = self.manifest
        self._served = served
        if isinstance(served, Store):
            served.take_over(manifest.store_id, manifest.generation)
            self._slot, self._share = reserve_slot(served, manifest, self._model)
        elif self._table is not None:
            served.take_over(manifest.store_id)
            named = NamedParts({})  # the store has no checkpoint
            self._part, self._share = reserve_part(served, self._table, self._model, named)

    def fetch_train_state(self) -> None:
        """Fetch the train state, on the writer; see `RangeFilling.train_state`."""
        if self._slot is not None:
            size_bytes = self._slot.train_state.size_bytes
            self._train_state = self._filling.train_state(self._marker, size_bytes)

    def fetch(self, require_going_on: GoingOn) -> None:
        """Fetch the share; see `RangeFilling`.

        Args:
            require_going_on: Function that is called again and again, and raises an error to end
                early.
        """
        if self._share is not None:
            shares = [self._share]
            fill_shares(self._filling, shares, self._marker.object_bytes, require_going_on)

    def seal_part(self) -> None:
        """Make the part of this rank durable, if it is not the writer.

        Raises:
            StoreError: It has another table than was sealed with the checkpoint.
            gds.StorageError: The part could not be made durable.
        """
        owner, part, table, expected = self._served, self._part, self._table, self._reference
        if part is None or table is None or expected is None or not isinstance(owner, OwnerStore):
            return
        self._sealed = seal_part(owner, part, table, expected)

    def tell_reference(self) -> OwnerReference | None:
        """Return the reference to the part, for the writer; None on the writer.

        From now on a checkpoint may name the part, so `close` must not free it any more.
        """
        self._is_told = True
        return self._sealed

    def publish(self, references: Sequence[OwnerReference]) -> StoredCheckpoint | None:
        """Make the slot and the parts of all ranks a checkpoint, on the writer; None on another.

        Args:
            references: What `tell_reference` has returned on the other ranks, by rising owner.

        The errors are those of `offload.store.sealing.Sealing.seal`.
        """
        store, slot = self._served, self._slot
        if slot is None or not isinstance(store, Store):
            return None
        found = publish(store, slot, self.manifest, references, self._train_state)
        self._slot = None  # it is a checkpoint now
        return found

    def published(self) -> None:
        """Record, on a rank that is not the writer, that the checkpoint is durable."""
        owner, part, self._part = self._served, self._part, None
        if part is not None and isinstance(owner, OwnerStore):
            owner.published(part)
            owner.release(part)  # it is opened again as the source of the next step

    def close(self) -> None:
        """Close the connection to the tier, and give up what is not published. Idempotent.

        The next download goes on from what has arrived, unless it may have been published.
        """
        store, slot, part = self._served, self._slot, self._part
        self._slot = self._part = None
        self._filling.end()  # a late answer must not be written to what is released
        if slot is not None and isinstance(store, Store) and store.checkpoint_of(slot) is None:
            store.release(slot)
        if part is not None and isinstance(store, OwnerStore):
            if part.state is OwnerSlotState.REPORTED and not self._is_told:
                with suppress(StorageError):  # then the part is given up, and fetched again
                    store.aborted(part)
            store.release(part)
        self._resources.close()


def _require_same_owners(url: str, manifest: Manifest, owners: Collection[int]) -> None:
    """Check that as many ranks run as made a checkpoint.

    Raises:
        CheckpointError: Others do.
    """
    made = [0, *(one.owner for one in manifest.owners)]
    if made != sorted(owners):
        by = "one process" if len(made) == 1 else f"{len(made)} ranks"
        raise CheckpointError(
            f"{url}: {by} made this checkpoint (owners {_listed(made)}), and {len(owners)} ranks "
            f"run now (owners {_listed(sorted(owners))}): restore() of several ranks takes a "
            "checkpoint of as many ranks from a tier. Run as many, or bring it to one directory "
            "with `offload pull` first, from which any number of ranks on that host goes on; "
            "fresh=True starts from the beginning"
        )


def _listed(owners: Sequence[int]) -> str:
    few = ", ".join(map(str, owners[:8]))
    return few if len(owners) <= 8 else f"{few}, ... {owners[-1]}"
