"""Filling of owners' slots and parts with what a copy has of them, and their publication.

A checkpoint of several ranks has a share for each owner of state. A rank that restores fetches its
own share, and a process that downloads the whole checkpoint fetches all of them. Every range is
compared with its digests before it is written. What an earlier download has left is compared first.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from offload.checkpoint.owner_parts import part_names
from offload.errors import StoreError
from offload.format.digests import DigestContext
from offload.format.manifest import Manifest
from offload.format.shares.owners import OwnerReference
from offload.format.shares.part_table import OwnerTable
from offload.store.opening import StoredCheckpoint
from offload.store.owners.claims import NamedParts
from offload.store.owners.slot import OwnerSlot
from offload.store.owners.store import OwnerStore
from offload.store.sealing import Composition
from offload.store.slots.slot import Slot
from offload.store.store import Store
from offload.tiers.contents import ModelObject, ModelRun, file_offset, state_objects
from offload.tiers.range_filling import GoingOn, Range, RangeFilling, go_on


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


def fill_shares(filling: RangeFilling, shares: Sequence[Share], object_bytes: int) -> None:
    """Fetch the tensors of shares into their slots and parts: the model, then the state."""
    models, states = _model_ranges(shares), _state_ranges(shares, object_bytes)
    _fill(filling, [*models, *states], go_on)
    _take_digests(shares)


def fill_models(filling: RangeFilling, shares: Sequence[Share], require_going_on: GoingOn) -> None:
    """Fetch the parameters and buffers of shares; see `fill_shares`."""
    _fill(filling, [*_model_ranges(shares)], require_going_on)


def fill_states(
    filling: RangeFilling, shares: Sequence[Share], object_bytes: int, require_going_on: GoingOn
) -> None:
    """Fetch the state of shares, as `fill_models` fetches the rest of them."""
    _fill(filling, [*_state_ranges(shares, object_bytes)], require_going_on)
    _take_digests(shares)


def _fill(filling: RangeFilling, ranges: Sequence[Range], require_going_on: GoingOn) -> None:
    filling.expect(sum(one.run.nbytes for one in ranges))
    filling.fill(ranges, require_going_on=require_going_on)


def _take_digests(shares: Sequence[Share]) -> None:
    """Note the digests of everything that has been compared with them."""
    for share in shares:
        for array, digests in share.sealed.digests.items():
            share.into.digests[array][:] = digests


def _model_ranges(shares: Sequence[Share]) -> Iterator[Range]:
    for share in shares:
        if share.model is not None:
            for run in share.model.runs():
                into, name = share.into.model, share.model.name
                yield Range(into, run.offset, name, run, share.may_hold_parts)


def _state_ranges(shares: Sequence[Share], object_bytes: int) -> Iterator[Range]:
    for share in shares:
        for wanted in state_objects(share.sealed, object_bytes):
            for start, chunk in wanted.starts():
                file = share.into.array(chunk.array, chunk.index)
                offset = file_offset(share.sealed.layout, chunk)
                run = ModelRun(start, (chunk,))
                yield Range(file, offset, wanted.name, run, share.may_hold_parts)


def reserve_slot(store: Store, manifest: Manifest, model: ModelObject | None) -> tuple[Slot, Share]:
    """Reserve a slot for the share of owner 0; return it, and the share."""
    leftover = {*store.leftovers()[0]}
    slot = store.acquire(manifest.layout, len(manifest.groups))
    slot.begin_generation(DigestContext(manifest.store_id, manifest.generation))
    return slot, Share(manifest, model, slot, slot.path in leftover)


def reserve_part(
    owner: OwnerStore, table: OwnerTable, model: ModelObject | None, named: NamedParts
) -> tuple[OwnerSlot, Share]:
    """Reserve a part for the share of another owner; return it, and the share."""
    before = {*part_names(owner.backend, owner.path)}
    boxes = [(one.name, one.box) for one in table.model_boxes]
    part = owner.ready(table.layout, table.generation, named, written=boxes)
    return part, Share(table, model, part, part.name in before)


def seal_part(
    owner: OwnerStore, part: OwnerSlot, table: OwnerTable, expected: OwnerReference
) -> OwnerReference:
    """Make a part that has been filled durable, and return the reference to it."""
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
        manifest: Manifest of the checkpoint. It has digests of the whole model if one process made
            it.
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
            manifest.model_digests,
            owners=references,
            model_boxes=manifest.model_boxes,
        ) as prepared:
            return store.sealing.publish(prepared)
    finally:
        store.sealing.end()
