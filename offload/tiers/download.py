"""Downloads of a checkpoint: the shares of all its owners, or those that one rank fetches.

A download fills a free slot of the store, and a part for each owner of state besides the first. The
store publishes them as it publishes every checkpoint: all data durable, then the manifest, then one
rename. Until then nothing is offered. A download that was interrupted leaves a slot and parts, as a
process does that was killed in a step. The next one compares what they hold with the digests of the
checkpoint, and asks only for the rest. So there is no record that could be wrong.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

from gds import Backend, StorageError
from offload.checkpoint.owner_parts import check_cover, part_names
from offload.errors import CheckpointError, StoreError, TierError
from offload.format.digests import DigestContext
from offload.format.manifest import Manifest
from offload.format.names import TRAIN_STATE_NAME
from offload.format.shares.owners import OwnerReference
from offload.format.shares.part_table import OwnerTable
from offload.store.claims import NamedParts
from offload.store.opening import StoredCheckpoint
from offload.store.owner_store import OwnerStore
from offload.store.sealing import Composition
from offload.store.slots.slot import OwnerSlot, Slot, SlotState
from offload.store.store import Store
from offload.tiers.catalog import TierCopy, read_table
from offload.tiers.checking import nothing
from offload.tiers.contents import (
    ModelObject,
    ModelRun,
    model_object,
    shard_object,
    state_objects,
)
from offload.tiers.filling import GoingOn, Range, RangeFilling, go_on
from offload.tiers.sending import NUM_TRANSFERS, Progress
from offload.tiers.services.objects import Objects


class _Share(NamedTuple):
    """What one owner has of a checkpoint, and the slot or part that gets it."""

    sealed: Manifest | OwnerTable
    """Manifest of the checkpoint for owner 0, or the table of another owner."""

    model: ModelObject | None
    into: Slot | OwnerSlot
    may_hold_parts: bool
    """Whether an earlier download may have filled some of it."""


@dataclass(slots=True)
class _Part:
    """The part of an owner besides the first."""

    reference: OwnerReference
    """As the checkpoint was sent."""

    table: OwnerTable
    store: OwnerStore | None = None
    is_served: bool = True
    """Whether the caller serves the owner; else `store` has been opened for the download alone."""

    slot: OwnerSlot | None = None
    sealed: OwnerReference | None = None
    """Reference to the part that has been made durable here."""


class Download:
    """Download of a checkpoint, or of the shares of some of its owners, into a store.

    The calls are `reserve`, `fetch_train_state`, `fetch_model`, `fetch_state`, `seal_parts`,
    `tell_references`, `publish` and `published`; those that concern only the first directory do
    nothing without the share of owner 0. `close` ends the download, at any time.

    Args:
        objects: Objects of the tier, which are closed with the download.
        copy: Complete copy to fetch.
        manifest: Manifest of the checkpoint on the drives of the store.
        backend: Storage backend of the store.
        directory: First directory of the store. It gets the parts of owners that nobody serves.
        owners: Owners whose shares are fetched; None for all.
        newest: Newest generation of the tier, after which the history of an empty store goes on;
            None for a store that has the identity of the checkpoint.
        num_transfers: Number of transfers at a time.
        progress: Function that is called with the bytes done and the bytes that are expected.
    """

    def __init__(
        self,
        objects: Objects,
        copy: TierCopy,
        manifest: Manifest,
        backend: Backend,
        directory: str,
        *,
        owners: Collection[int] | None = None,
        newest: int | None = None,
        num_transfers: int = NUM_TRANSFERS,
        progress: Progress | None = None,
    ) -> None:
        if copy.marker is None:
            raise TierError(errno.EINVAL, copy.reason, copy.url)
        self.url = copy.url
        self.manifest = manifest
        self.is_recut = False
        """Whether other ranks than the present ones made the checkpoint."""
        self._objects = objects
        self._marker = copy.marker
        self._backend = backend
        self._directory = directory
        self._newest = newest
        self._store: Store | None = None
        self._slot: Slot | None = None
        self._shares: list[_Share] = []
        self._model: ModelObject | None = None
        self._train_state = b""
        self._is_told = False
        """Whether others may know the references to the parts, and publish them."""
        has_first = owners is None or 0 in owners
        tables = [
            (one, read_table(objects, copy, manifest, one))
            for one in manifest.owners
            if has_first or (owners is not None and one.owner in owners)
        ]
        self._parts = [
            _Part(one, table) for one, table in tables if owners is None or one.owner in owners
        ]
        if has_first:
            if tables:
                check_cover(copy.url, manifest, [table for _, table in tables])
            self._model = model_object(manifest, [table for _, table in tables])
        self._filling = RangeFilling(objects, copy, manifest, backend, num_transfers, progress)

    @property
    def own_manifest(self) -> Manifest:
        """The manifest, with the layout and the scalar state of a rank's own share.

        If other ranks made the checkpoint, or this one has the first share, it is `manifest`.
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
        """Number of bytes that have been fetched from the tier."""
        return self._filling.bytes_fetched

    @property
    def bytes_kept(self) -> int:
        """Number of bytes that an earlier download had left."""
        return self._filling.bytes_kept

    def reserve(self, served: Store | OwnerStore) -> None:
        """Reserve room for the shares, in a store that becomes one of this checkpoint's.

        `served` is the store with the first directory, or the parts of one owner. If there is no
        room, nothing has been fetched.
        """
        manifest = self.manifest
        if self._newest is not None:
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
            leftover = {*served.leftovers()[0]}
            self._slot = slot = served.acquire(manifest.layout, len(manifest.groups))
            slot.begin_generation(DigestContext(manifest.store_id, manifest.generation))
            self._expect(_Share(manifest, self._model, slot, slot.path in leftover))
        for part in self._parts:
            if part.store is not None:
                named = served.named_parts() if isinstance(served, Store) else NamedParts({})
                table, before = part.table, {*part_names(self._backend, part.store.path)}
                boxes = [(one.name, one.box) for one in table.model_boxes]
                part.slot = part.store.ready(table.layout, table.generation, named, written=boxes)
                may_hold_parts = part.slot.name in before
                self._expect(_Share(table, shard_object(table), part.slot, may_hold_parts))
        expected = [one.run.nbytes for one in (*self._model_ranges(), *self._state_ranges())]
        train_state = 0 if self._slot is None else self._marker.sizes[TRAIN_STATE_NAME]
        self._filling.expected = train_state + sum(expected)

    def _expect(self, share: _Share) -> None:
        """Note a share, and the digests that its state is going to have."""
        for array, digests in share.sealed.digests.items():
            share.into.digests[array][:] = digests
        self._shares.append(share)

    def _owner_store(self, part: _Part, served: Store | OwnerStore) -> OwnerStore:
        """Return the store of a part; that of an owner whom nobody serves is opened."""
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
        """Slot or part with the only share that is fetched; it has been reserved."""
        part = self._parts[0].slot if self._parts else None
        return self.first_slot if part is None else part

    @property
    def first_slot(self) -> Slot:
        """Slot with the share of owner 0; it has been reserved."""
        if self._slot is None:
            raise RuntimeError("no slot has been reserved")
        return self._slot

    @property
    def folder(self) -> str:
        """Directory of the slot, which has the train state and the common model; else empty."""
        return self._slot.path if self._slot is not None else ""

    def fetch_train_state(self) -> None:
        """Fetch the train state into the slot."""
        if self._slot is not None:
            size_bytes = self._slot.train_state.size_bytes
            self._train_state = self._filling.train_state(self._marker, size_bytes)
            self._slot.train_state.write_bytes(self._train_state, 0)

    def fetch_model(self, require_going_on: GoingOn = go_on) -> None:
        """Fetch parameters and buffers."""
        self._filling.fill([*self._model_ranges()], require_going_on=require_going_on)

    def fetch_state(
        self,
        require_going_on: GoingOn = go_on,
        order: Sequence[int] | None = None,
        arrived: Callable[[int], object] = nothing,
    ) -> None:
        """Fetch the optimizer state: in the order of the files, or of chunks of the only share.

        `arrived` is called with the chunk of each piece that is here.
        """
        ranges = [*self._state_ranges()]
        if order is not None:
            places = {chunk: place for place, chunk in enumerate(order)}
            ranges.sort(key=lambda one: places[one.run.chunks[0].index])
        self._filling.fill(ranges, arrived, require_going_on)

    def state_pieces(self) -> list[int]:
        """Return the chunk of each piece of state: a chunk has one in each state array."""
        return [chunk.index for one in self._state_ranges() for chunk in one.run.chunks]

    def _model_ranges(self) -> Iterator[Range]:
        for share in self._shares:
            if share.model is not None:
                for run in share.model.runs():
                    into, name = share.into.model, share.model.name
                    yield Range(into, run.offset, name, run, share.may_hold_parts)

    def _state_ranges(self) -> Iterator[Range]:
        for share in self._shares:
            for wanted in state_objects(share.sealed, self._marker.object_bytes):
                for start, chunk in wanted.starts():
                    file = share.into.array(chunk.array, chunk.index)
                    offset = share.sealed.layout.byte_range(chunk.array, chunk.index)[0]
                    run = ModelRun(start, (chunk,))
                    yield Range(file, offset, wanted.name, run, share.may_hold_parts)

    def seal_parts(self) -> None:
        """Make the parts that have been fetched durable."""
        for part in self._parts:
            if part.store is not None and part.slot is not None:
                scalars, boxes = part.table.scalars, part.table.model_boxes
                reference = part.store.prepare(part.slot, scalars, boxes)
                if reference.digest != part.reference.digest:
                    raise StoreError(
                        errno.EIO,
                        f"the table of owner {reference.owner} has the digest {reference.digest} "
                        f"after the download, expected {part.reference.digest}: report this as a "
                        "bug",
                        part.slot.path,
                    )
                part.sealed = reference

    def tell_references(self) -> list[OwnerReference]:
        """Return the references to the parts that have been fetched.

        From now on a checkpoint may name the parts, so `close` must not free them any more.
        """
        self._is_told = True
        return [part.sealed for part in self._parts if part.sealed is not None]

    def publish(self, references: Sequence[OwnerReference]) -> StoredCheckpoint | None:
        """Make the slot and the parts one checkpoint; None without the share of owner 0.

        `references` are those to the parts of all other owners, durable, by rising number.
        """
        store, slot, manifest = self._store, self._slot, self.manifest
        if slot is None or store is None:
            return None
        here = replace(manifest, owners=tuple(references))
        store.sealing.begin(here)
        try:
            prepared = store.sealing.prepare(
                slot,
                Composition(here, self._train_state),
                manifest.model_digests,
                owners=references,
                model_boxes=manifest.model_boxes,
            )
            with closing(prepared):
                found = store.sealing.publish(prepared)
        finally:
            store.sealing.end()
        self._slot = None  # it is a checkpoint now
        return found

    def published(self) -> None:
        """Record that the checkpoint with the parts is durable."""
        for part in self._parts:
            slot, part.slot = part.slot, None
            if part.store is not None and slot is not None:
                part.store.published(slot)
                part.store.release(slot)  # it is opened again as the source of the next step

    def end(self) -> None:
        """Write nothing more; on return no thread uses a slot or part. Idempotent."""
        self._filling.end()
        self._objects.close()

    def close(self) -> None:
        """End the download, and give up what is not published. Idempotent.

        The next download goes on from what has arrived, unless it may have been published.
        """
        store, slot = self._store, self._slot
        self._slot = None
        self.end()
        if slot is not None and store is not None and store.checkpoint_of(slot) is None:
            store.release(slot)
        for part in self._parts:
            self._close_part(part)

    def _close_part(self, part: _Part) -> None:
        owner, slot = part.store, part.slot
        part.store = part.slot = None
        if owner is None:
            return
        if slot is not None:
            if slot.state is SlotState.IN_DOUBT and not self._is_told:
                with suppress(StorageError):  # then the part is given up, and fetched again
                    owner.aborted(slot)
            owner.release(slot)
        if not part.is_served:
            owner.close()


def on_drives(manifest: Manifest, num_drives: int, copy: TierCopy) -> Manifest:
    """Return the manifest of the same checkpoint on a number of drives."""
    if manifest.owners:
        if num_drives > 1:
            raise CheckpointError(
                f"{copy.url}: several ranks made this checkpoint, and all of it is downloaded into "
                "one directory: leave out the others"
            )
        return manifest
    layout = manifest.layout
    if len(layout.shares) != num_drives:
        layout = replace(layout, shares=(1,) * num_drives)
    return replace(manifest, layout=layout, parts=())
