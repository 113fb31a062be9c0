"""Filling of owners' slots and parts with what a copy has of them, and their publication.

A checkpoint of several ranks has a share for each owner of state. A rank that restores fetches its
own share, and a process that downloads the whole checkpoint fetches all of them. Every range is
compared with its digests before it is written. What an earlier download has left is compared first.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from gds import ALIGNMENT, Backend, Buffer, File, StorageError
from offload.checkpoint.owner_parts import part_names
from offload.errors import StoreError
from offload.format.digests import DigestContext
from offload.format.manifest import Manifest
from offload.format.names import TRAIN_STATE_NAME
from offload.format.shares.owners import OwnerReference
from offload.format.shares.part_table import OwnerTable
from offload.format.train_state import unpack_encoded
from offload.store.opening import StoredCheckpoint
from offload.store.owners.claims import NamedParts
from offload.store.owners.slot import OwnerSlot
from offload.store.owners.store import OwnerStore
from offload.store.sealing import Composition, pack_train_state
from offload.store.slot import Slot
from offload.store.store import Store
from offload.tiers.catalog import TierCopy
from offload.tiers.checking import Fetcher
from offload.tiers.contents import Chunk, file_offset, state_objects
from offload.tiers.filling import GoingOn, SlotUse
from offload.tiers.marker import Marker
from offload.tiers.model_objects import ModelObject, ModelRun
from offload.tiers.sending import Progress
from offload.tiers.services.objects import Objects
from offload.tiers.workers import Task, run_all


@dataclass(frozen=True, slots=True)
class Share:
    """What one owner has of a checkpoint, and the slot or part that gets it."""

    sealed: Manifest | OwnerTable
    """Manifest of the checkpoint for owner 0, or the table of another owner."""

    model: ModelObject | None
    """Object of the model that is fetched with the share; None if the owner has none."""

    into: Slot | OwnerSlot
    may_hold_parts: bool
    """Whether an earlier download may have filled some of it."""


class _Range(NamedTuple):
    """Consecutive bytes of a file here and of an object there."""

    file: File
    offset: int
    name: str
    run: ModelRun
    """The bytes in the object."""

    may_be_there: bool


class SharesDownload:
    """Download of shares of a checkpoint.

    Args:
        objects: Objects of the tier.
        copy: Copy to fetch.
        marker: Marker of the copy.
        manifest: Manifest of the checkpoint.
        backend: Storage backend that memory is allocated with.
        num_transfers: Number of transfers at a time.
        progress: Function that is called with the bytes done and the total.
    """

    def __init__(
        self,
        objects: Objects,
        copy: TierCopy,
        marker: Marker,
        manifest: Manifest,
        backend: Backend,
        num_transfers: int,
        progress: Progress | None = None,
    ) -> None:
        self._marker = marker
        self._manifest = manifest
        self._backend = backend
        self._num_transfers = num_transfers
        self._progress = progress
        self._fetcher = Fetcher(objects, copy.folder, manifest)
        self._context = DigestContext(manifest.store_id, manifest.generation)
        self._mutex = threading.Lock()
        self._use = SlotUse(copy.url)
        self._total = 0
        self.bytes_fetched = 0
        """Number of bytes fetched from the tier."""
        self.bytes_kept = 0
        """Number of bytes that the store held already."""

    def fill(self, shares: Sequence[Share], require_going_on: GoingOn = lambda: None) -> None:
        """Fetch the tensors of shares into their slots and parts.

        Args:
            shares: The shares.
            require_going_on: Function that is called again and again, and raises an error to end
                early.

        Raises:
            DamagedError: An object is missing, or has other bytes than were sent.
            TierError: An object cannot be read.
            gds.StorageError: A slot or part cannot be written.
        """
        ranges = [one for share in shares for one in self._ranges(share)]
        self._total += sum(one.run.nbytes for one in ranges)
        most = max((one.run.nbytes for one in ranges), default=0)
        tasks: Iterator[Task] = (partial(self._fill_range, one) for one in ranges)
        run_all(
            tasks,
            self._num_transfers,
            lambda: self._backend.allocate(most + ALIGNMENT, "host"),
            require_going_on,
        )
        for share in shares:
            for array, digests in share.sealed.digests.items():
                share.into.digests[array][:] = digests

    def train_state(self, slot: Slot) -> bytes:
        """Fetch the train state, packed for a slot, which may reserve another size for it.

        Raises:
            TrainStateTooLargeError: The train state does not fit into the slot.
            DamagedError: The object is missing, or has other bytes than were sent.
            TierError: The object cannot be read.
        """
        name = TRAIN_STATE_NAME
        nbytes, size_bytes = self._marker.sizes[name], slot.train_state.size_bytes
        self._total += nbytes
        data = self._fetcher.whole(name, nbytes, self._marker.digests[name])
        self._advance(nbytes, fetched=True)
        if len(data) == size_bytes:
            return data
        return pack_train_state(unpack_encoded(data)[0], self._manifest, size_bytes)

    def end(self) -> None:
        """Write nothing more. On return no thread of this download uses a slot or part. Idempotent.

        A request that is not answered may keep its thread for long. What it brings is dropped.
        """
        self._use.end()

    def _ranges(self, share: Share) -> Iterator[_Range]:
        """Yield everything of a share that has digests: its part of the model, then its state."""
        into, may_hold = share.into, share.may_hold_parts
        if share.model is not None:
            for run in share.model.runs():
                yield _Range(into.model, run.offset, share.model.name, run, may_hold)
        for wanted in state_objects(share.sealed, self._marker.object_bytes):
            for start, chunk in wanted.starts():
                file = into.array(chunk.array, chunk.index)
                offset = file_offset(share.sealed.layout, chunk)
                yield _Range(file, offset, wanted.name, ModelRun(start, (chunk,)), may_hold)

    def _fill_range(self, one: _Range, buffer: Buffer) -> None:
        """Fetch a range and write it, unless the file holds it."""
        nbytes = one.run.nbytes
        into = buffer.slice(one.offset % ALIGNMENT, nbytes)
        with self._use.block():
            kept = one.may_be_there and self._holds(one, into)
        if not kept:
            into.memoryview()[:] = memoryview(self._fetcher.run(one.name, one.run))
            with self._use.block():
                one.file.write(into, one.offset).result()
        self._advance(nbytes, fetched=not kept)

    def _holds(self, one: _Range, into: Buffer) -> bool:
        try:
            one.file.read(into, one.offset).result()
        except StorageError:
            return False  # a sector that cannot be read may well be written
        start = 0
        for chunk in one.run.chunks:
            view = into.slice(start, chunk.nbytes).memoryview()
            if not self._is_good(chunk, view):
                return False
            start += chunk.nbytes
        return True

    def _is_good(self, chunk: Chunk, view: memoryview) -> bool:
        return self._context.digest(chunk.array, chunk.index, view) == chunk.digest

    def _advance(self, nbytes: int, *, fetched: bool) -> None:
        with self._mutex:
            if fetched:
                self.bytes_fetched += nbytes
            else:
                self.bytes_kept += nbytes
            if self._progress is not None:
                self._progress(self.bytes_fetched + self.bytes_kept, self._total)


def reserve_slot(store: Store, manifest: Manifest, model: ModelObject | None) -> tuple[Slot, Share]:
    """Reserve a slot for the share of owner 0; return it, and the share.

    Raises:
        StoreFullError: There is no room.
    """
    leftover = {*store.leftovers()[0]}
    slot = store.acquire(manifest.layout, len(manifest.groups))
    slot.begin_generation(DigestContext(manifest.store_id, manifest.generation))
    return slot, Share(manifest, model, slot, slot.path in leftover)


def reserve_part(
    owner: OwnerStore, table: OwnerTable, model: ModelObject | None, named: NamedParts
) -> tuple[OwnerSlot, Share]:
    """Reserve a part for the share of another owner; return it, and the share.

    Args:
        owner: Parts of the owner.
        table: Table of the owner.
        model: Object of the owner's shard file; None if it has none.
        named: Parts that any checkpoint of the store names at this moment.

    Raises:
        StoreFullError: There is no room.
    """
    before = {*part_names(owner.backend, owner.path)}
    boxes = [(one.name, one.box) for one in table.model_boxes]
    part = owner.ready(table.layout, table.generation, named, written=boxes)
    return part, Share(table, model, part, part.name in before)


def seal_part(
    owner: OwnerStore, part: OwnerSlot, table: OwnerTable, expected: OwnerReference
) -> OwnerReference:
    """Make a part that has been filled durable, and return the reference to it.

    Raises:
        StoreError: It has another table than was sealed with the checkpoint.
        gds.StorageError: The part could not be made durable.
    """
    reference = owner.prepare(part, table.scalars, table.model_boxes)
    if reference.digest != expected.digest:
        raise StoreError(
            errno.EIO,
            f"the table of owner {reference.owner} has the digest {reference.digest} after the "
            f"download, expected {expected.digest}: report this as a bug",
            part.path,
        )
    return reference


def publish(
    store: Store,
    slot: Slot,
    manifest: Manifest,
    references: Sequence[OwnerReference],
    train_state: bytes,
) -> StoredCheckpoint:
    """Make a filled slot and the parts of all owners, which are durable, one checkpoint.

    Args:
        store: Store of the first directory.
        slot: Slot of owner 0.
        manifest: Manifest of the checkpoint.
        references: References to the parts of the other owners, by rising number.
        train_state: Train state, packed for the slot.

    The errors are those of `offload.store.sealing.Sealing.seal`.
    """
    here = replace(manifest, owners=tuple(references))
    store.sealing.begin(here)
    try:
        with store.sealing.prepare(
            slot,
            Composition(here, train_state),
            (),
            owners=references,
            model_boxes=manifest.model_boxes,
        ) as prepared:
            return store.sealing.publish(prepared)
    finally:
        store.sealing.end()
