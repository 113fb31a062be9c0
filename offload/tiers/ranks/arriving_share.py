"""What one rank fetches of a checkpoint, when several ranks restore it from a tier.

The writer finds the checkpoint, and all ranks open the copy that it names. Each reserves room for
the share of the owner that it serves, and fetches it. If other owners made the checkpoint, their
shares are dealt over the ranks, and come as they were sealed; the ranks then go on from the
checkpoint as from one of another number of ranks. All parts are made durable, and then the writer
publishes the checkpoint. Until that rename there is none, so a rank that is killed leaves a slot or
parts, from which the next restore goes on. The ranks agree after each of these steps; see
`offload.engine.rank_arrival`.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace

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
from offload.tiers.catalog import (
    find_copy,
    find_newest_whole,
    newest_generation,
    read_manifest,
    read_table,
    read_tables,
)
from offload.tiers.contents import model_object, shard_object
from offload.tiers.download import on_drives
from offload.tiers.range_filling import GoingOn, RangeFilling
from offload.tiers.ranks.filling_shares import (
    Share,
    fill_models,
    fill_states,
    publish,
    reserve_part,
    reserve_slot,
    seal_part,
)
from offload.tiers.sending import NUM_TRANSFERS
from offload.tiers.services.address import parse_address
from offload.tiers.services.opening import DEFAULT_RETRY_S, DEFAULT_TIMEOUT_S, open_objects


def find_newest(url: str, store: str, tried: Mapping[str, str]) -> tuple[str, str]:
    """Return the URL of the newest whole copy of a tier; empty if the tier has no complete one.

    Args:
        url: URL of the tier, of a store in it, or of one copy.
        store: First directory of the store.
        tried: Copies that were found damaged before, by URL, with the reasons.

    Returns:
        The URL; and a sentence if copies were passed over, or if none of them is complete.

    The errors are those of `find_newest_whole`.
    """
    address = parse_address(url)
    with open_objects(address, timeout_s=DEFAULT_TIMEOUT_S, retry_s=DEFAULT_RETRY_S) as objects:
        whole, warning = find_newest_whole(objects, url, store, tried)
    return "" if whole is None else whole.copy.url, warning


@dataclass(slots=True)
class _Part:
    """The part of an owner besides the first, which this rank fetches."""

    reference: OwnerReference
    """As the checkpoint was sent."""

    table: OwnerTable
    store: OwnerStore | None = None
    is_served: bool = True
    """Whether this rank serves the owner; else it has opened `store` for the download alone."""

    slot: OwnerSlot | None = None
    sealed: OwnerReference | None = None
    """Reference to the part that has been made durable here."""


class ArrivingShare:
    """The share of one rank in a checkpoint that arrives from a tier.

    The calls are `reserve`, `fetch_train_state`, `fetch_model`, `fetch_state`, `seal_parts`,
    `tell_references`, `publish` and `published`; those that concern only the writer do nothing on
    the rest. `close` ends it, at any time.

    Args:
        url: URL of the copy, the same on all ranks.
        backend: Storage backend of the store.
        directory: First directory of the store. It gets the parts of owners that no rank serves.
        served: Owner that each rank serves, by rank; 0 for the writer.
        rank: This rank.
        sees_all: Whether all ranks are on one host.

    Raises:
        CheckpointError: Other ranks than the present ones made the checkpoint, and these are on
            several hosts; or its owners do not have each element of it once.
        DamagedError: The manifest or a table is missing, or is not the one that was sent.
        TierError: The tier cannot be used.
    """

    def __init__(
        self,
        url: str,
        backend: Backend,
        directory: str,
        served: Sequence[int],
        rank: int,
        *,
        sees_all: bool,
    ) -> None:
        self.url = url
        """URL of the copy."""
        self._backend = backend
        self._directory = directory
        self._slot: Slot | None = None
        self._shares: list[Share] = []
        self._store: Store | None = None
        self._train_state = b""
        self._is_told = False
        """Whether the writer may know the references to this rank's parts, and publish them."""
        address = parse_address(url)
        with ExitStack() as opened:
            objects = opened.enter_context(
                open_objects(address, timeout_s=DEFAULT_TIMEOUT_S, retry_s=DEFAULT_RETRY_S)
            )
            copy = find_copy(objects, address)
            if copy.marker is None:
                raise TierError(errno.EINVAL, copy.reason, url)
            manifest = on_drives(read_manifest(objects, copy), 1, copy)
            made = [0, *(one.owner for one in manifest.owners)]
            self.is_recut = made != sorted(served)
            """Whether other ranks than the present ones made the checkpoint."""
            if self.is_recut and not sees_all:
                raise _refusal(url, made, served)
            self.manifest = manifest
            """Manifest of the checkpoint, as it was sent."""
            here = deal_owners(made, served)[rank]
            self._parts = [
                _Part(one, read_table(objects, copy, manifest, one))
                for one in manifest.owners
                if one.owner in here
            ]
            if not served[rank]:
                tables = read_tables(objects, copy, manifest)
                if tables:
                    check_cover(url, manifest, tables)
                self._model = model_object(manifest, tables)
                self._newest = newest_generation(objects, manifest.store_id)
            self._marker = copy.marker
            self._filling = RangeFilling(objects, copy, manifest, backend, NUM_TRANSFERS)
            self._resources = opened.pop_all()

    @property
    def own_manifest(self) -> Manifest:
        """The manifest, with the layout and the scalar state of this rank's share.

        If other ranks made the checkpoint, it is the manifest as it was sent.
        """
        if self.is_recut or not self._parts:
            return self.manifest
        table = self._parts[0].table
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
        if isinstance(served, Store):
            owners = [self._directory] * len(manifest.owners)
            newest = max(manifest.generation, self._newest)
            served.take_over(manifest.store_id, newest, owners)
        else:
            served.take_over(manifest.store_id)
        for part in self._parts:  # locks them, so that nobody removes them before they are named
            part.store = self._owner_store(part, served)
        if isinstance(served, Store):
            self._store = served
            self._slot, share = reserve_slot(served, manifest, self._model)
            self._shares.append(share)
        for part in self._parts:
            if part.store is not None:
                named = NamedParts({})  # the store has no checkpoint
                model = shard_object(part.table)
                part.slot, share = reserve_part(part.store, part.table, model, named)
                self._shares.append(share)

    def _owner_store(self, part: _Part, served: Store | OwnerStore) -> OwnerStore:
        """Return the store of a part; that of an owner whom no rank serves is opened."""
        owner = part.reference.owner
        part.is_served = isinstance(served, OwnerStore) and served.owner == owner
        if isinstance(served, OwnerStore) and part.is_served:
            return served
        # The file system was accepted when the store was opened.
        return OwnerStore(
            self._backend,
            self._directory,
            owner,
            store_id=self.manifest.store_id,
            allow_volatile=True,
            allow_remote=True,
        )

    @property
    def slot(self) -> Slot | OwnerSlot:
        """Slot or part with this rank's share, if as many ranks run as made the checkpoint.

        Raises:
            RuntimeError: Nothing is reserved.
        """
        found = self._slot if self._slot is not None else self._parts[0].slot
        if found is None:
            raise RuntimeError("no slot or part has been reserved")
        return found

    @property
    def folder(self) -> str:
        """Directory of the slot, which has the train state and the common model; else empty."""
        return self._slot.path if self._slot is not None else ""

    def fetch_train_state(self) -> None:
        """Fetch the train state into the slot, on the writer; see `RangeFilling.train_state`."""
        if self._slot is not None:
            size_bytes = self._slot.train_state.size_bytes
            self._train_state = self._filling.train_state(self._marker, size_bytes)
            self._slot.train_state.write_bytes(self._train_state, 0)

    def fetch_model(self, require_going_on: GoingOn) -> None:
        """Fetch parameters and buffers; see `RangeFilling`.

        Args:
            require_going_on: Function that is called again and again, and raises an error to end
                early.
        """
        fill_models(self._filling, self._shares, require_going_on)

    def fetch_state(self, require_going_on: GoingOn) -> None:
        """Fetch the optimizer state, as `fetch_model` fetches the rest."""
        fill_states(self._filling, self._shares, self._marker.object_bytes, require_going_on)

    def seal_parts(self) -> None:
        """Make the parts that this rank has fetched durable.

        Raises:
            StoreError: One has another table than was sealed with the checkpoint.
            gds.StorageError: A part could not be made durable.
        """
        for part in self._parts:
            if part.store is not None and part.slot is not None:
                part.sealed = seal_part(part.store, part.slot, part.table, part.reference)

    def tell_references(self) -> list[OwnerReference]:
        """Return the references to the parts that this rank has fetched, for the writer.

        From now on a checkpoint may name the parts, so `close` must not free them any more.
        """
        self._is_told = True
        return [part.sealed for part in self._parts if part.sealed is not None]

    def publish(self, references: Sequence[OwnerReference]) -> StoredCheckpoint | None:
        """Make the slot and the parts of all ranks a checkpoint, on the writer; None on another.

        Args:
            references: What `tell_references` has returned on all ranks, by rising owner.

        The errors are those of `offload.store.sealing.Sealing.seal`.
        """
        store, slot = self._store, self._slot
        if slot is None or store is None:
            return None
        found = publish(store, slot, self.manifest, references, self._train_state)
        self._slot = None  # it is a checkpoint now
        return found

    def published(self) -> None:
        """Record that the checkpoint with the parts of this rank is durable."""
        for part in self._parts:
            slot, part.slot = part.slot, None
            if part.store is not None and slot is not None:
                part.store.published(slot)
                part.store.release(slot)  # it is opened again as the source of the next step

    def close(self) -> None:
        """Close the connection to the tier, and give up what is not published. Idempotent.

        The next download goes on from what has arrived, unless it may have been published.
        """
        store, slot = self._store, self._slot
        self._slot = None
        self._filling.end()  # a late answer must not be written to what is released
        if slot is not None and store is not None and store.checkpoint_of(slot) is None:
            store.release(slot)
        for part in self._parts:
            self._close_part(part)
        self._resources.close()

    def _close_part(self, part: _Part) -> None:
        owner, slot = part.store, part.slot
        part.store = part.slot = None
        if owner is None:
            return
        if slot is not None:
            if slot.state is OwnerSlotState.REPORTED and not self._is_told:
                with suppress(StorageError):  # then the part is given up, and fetched again
                    owner.aborted(slot)
            owner.release(slot)
        if not part.is_served:
            owner.close()


def deal_owners(made: Sequence[int], served: Sequence[int]) -> list[list[int]]:
    """Return the owners whose shares each rank fetches, by rank.

    A rank fetches the share of the owner that it serves, if that owner made the checkpoint with the
    others. The shares of owners that no rank serves go to the ranks that have the fewest.
    """
    dealt = [[owner] if owner in made else [] for owner in served]
    for owner in made:
        if owner not in served:
            min(dealt, key=len).append(owner)
    return dealt


def _refusal(url: str, made: Sequence[int], served: Sequence[int]) -> CheckpointError:
    """Return the error that other ranks, which are on several hosts, made a checkpoint."""
    by = "one process" if len(made) == 1 else f"{len(made)} ranks"
    return CheckpointError(
        f"{url}: {by} made this checkpoint (owners {_listed(made)}), and {len(served)} ranks on "
        f"several hosts run now (owners {_listed(sorted(served))}): ranks on several hosts take a "
        "checkpoint of as many ranks from a tier. Run as many, or bring it to one directory with "
        "`offload pull` first, from which any number of ranks on that host goes on; fresh=True "
        "starts from the beginning"
    )


def _listed(owners: Sequence[int]) -> str:
    few = ", ".join(map(str, owners[:8]))
    return few if len(owners) <= 8 else f"{few}, ... {owners[-1]}"
