"""Sealing: the content of a checkpoint, its durability, and the rename that makes it a checkpoint.

Sealing is three calls:

- `compose` describes the checkpoint when it is requested. It fails if the hyper-parameters or the
  train state are too large for the slot.
- `Sealing.prepare` makes every file of the slot and of its parts durable, and the manifest last.
- `Sealing.publish` renames the slot to ``step-<N>`` and makes that name durable. The rename is the
  commit.

Between `prepare` and `publish` the whole content of the checkpoint is durable, and no reader sees
it.
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, NamedTuple

from gds import StorageError
from gds.contract import Lock
from offload.checkpoint.file_check import train_state_header
from offload.errors import StoreError
from offload.format._manifest_fields import ScalarValue
from offload.format.boxes import Box
from offload.format.layout import Layout
from offload.format.manifest import Manifest, num_model_blocks
from offload.format.names import checkpoint_name, part_name
from offload.format.shares.owners import ModelBox, OwnerReference, num_pieces
from offload.format.train_state import EncodedState, pack_encoded
from offload.retention.policy import Record
from offload.store.expiry import Keeping
from offload.store.opening import StoreContent, StoredCheckpoint, record_of
from offload.store.slots.folder import lock_existing
from offload.store.slots.free import FreeSlots
from offload.store.slots.slot import Slot, SlotState
from offload.store.withdrawal import Withdrawal

_NO_DIGEST = "0" * 16

_NOT_DURABLE = "a checkpoint could not be made durable"

_MAX_OPEN = 3
"""Number of checkpoints whose files are kept open. With a small keep=, a recycled checkpoint is
then ready for writing."""


class Composition(NamedTuple):
    """Content of a checkpoint besides its tensors."""

    manifest: Manifest
    """Manifest of the checkpoint; its digests are placeholders until `Sealing.prepare`."""

    train_state: bytes
    """Train state, packed and padded to the size of the slot's file."""


def compose(
    slot: Slot,
    train_state: EncodedState,
    *,
    step: int,
    torch_version: str,
    optimizer: str,
    groups: Iterable[Mapping[str, Any]],
    scalars: Iterable[tuple[ScalarValue, ...] | None],
    order: Sequence[Sequence[int]] | None,
    metrics: Mapping[str, float] | None = None,
    update_code: str = "",
    owners: Mapping[int, str] | None = None,
    model_boxes: Iterable[tuple[str, Box]] = (),
) -> Composition:
    """Describe the checkpoint that a slot will be.

    Args:
        slot: Slot of the checkpoint. It has its generation; its data need not be written yet.
        train_state: Train state of the user.
        step: Optimizer steps taken.
        torch_version: Version of torch that computed the state.
        optimizer: Qualified name of the torch optimizer class.
        groups: Hyper-parameters of each group. They must not change from now on.
        scalars: Scalar state of each parameter, in the order of the layout.
        order: For each group, the positions of its parameters in the layout's model; None if they
            are not known.
        metrics: Metrics of the user, checked.
        update_code: Code that updated the state last, in words.
        owners: For each owner of state besides the first, the store's directory on its node.
        model_boxes: If there are other owners: tensors of the model, with the box of each that this
            process writes.

    Raises:
        OffloadError: The hyper-parameters do not fit into the space that the slot has for them.
        TypeError: A hyper-parameter cannot be stored. The message names it.
        offload.errors.TrainStateTooLargeError: The train state does not fit.
    """
    layout = slot.layout
    manifest = Manifest(
        store_id=slot.context.store_id,
        generation=slot.context.generation,
        step=step,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        torch_version=torch_version,
        optimizer=optimizer,
        groups=tuple(groups),
        layout=layout,
        scalars=tuple(scalars),
        digests=dict.fromkeys(layout.array_names, (_NO_DIGEST,) * layout.num_chunks),
        model_digests=() if owners else (_NO_DIGEST,) * num_model_blocks(layout),
        parts=slot.part_references,
        owners=_placeholders(owners or {}, slot.context.generation),
        model_boxes=_placeholder_boxes(layout, model_boxes) if owners else (),
        metrics=metrics or {},
        order=None if order is None else tuple(map(tuple, order)),
        update_code=update_code,
    )
    manifest.encode(slot.manifest.size_bytes)
    packed = pack_train_state(train_state, manifest, slot.train_state.size_bytes)
    return Composition(manifest, packed)


def _placeholders(owners: Mapping[int, str], generation: int) -> tuple[OwnerReference, ...]:
    """Return references that take as much space as those that `Sealing.prepare` will get."""
    return tuple(
        OwnerReference(owner, directory, part_name(10**17), generation, _NO_DIGEST * 2)
        for owner, directory in sorted(owners.items())
    )


def _placeholder_boxes(layout: Layout, boxes: Iterable[tuple[str, Box]]) -> tuple[ModelBox, ...]:
    tensors = {tensor.name: tensor for tensor in layout.model}
    found = []
    for name, box in boxes:
        nbytes = ModelBox(name, box, ()).num_bytes(tensors[name])
        found.append(ModelBox(name, box, (_NO_DIGEST,) * num_pieces(nbytes)))
    return tuple(found)


def pack_train_state(state: EncodedState, manifest: Manifest, size_bytes: int) -> bytes:
    """Return the content of ``train_state.safetensors``, whose metadata names its checkpoint."""
    return pack_encoded(state, capacity_bytes=size_bytes, header=train_state_header(manifest))


class Prepared:
    """A durable slot, with its parts, that `Sealing.publish` can make a checkpoint.

    Until it is closed, the checkpoint of the same step that has the path, if there is one, stays
    locked. If that is before `Sealing.publish`, the slot is not a checkpoint.
    """

    def __init__(self, slot: Slot, path: str, manifest: Manifest, replaced: Lock | None) -> None:
        self.slot = slot
        self.path = path
        self.manifest = manifest
        self._replaced_lock = replaced

    def close(self) -> None:
        """Release the lock on the checkpoint that has the path. Idempotent."""
        replaced, self._replaced_lock = self._replaced_lock, None
        if replaced is not None:
            replaced.release()


class Sealing:
    """Turns written slots of a store into checkpoints."""

    def __init__(
        self,
        opened: StoreContent,
        keeping: Keeping,
        withdrawal: Withdrawal,
        free: FreeSlots,
        *,
        reader_timeout_s: float,
    ) -> None:
        self._backend = opened.backend
        self._directory = opened.directory
        self._checkpoints = opened.checkpoints
        self._refused = opened.refused
        self._claims = opened.parts.claims
        self._lock = opened.lock
        self._keeping = keeping
        self._withdrawal = withdrawal
        self._free = free
        self._poison = opened.poison
        self._changed = opened.changed
        self._reader_timeout_s = reader_timeout_s
        self.incoming: Record | None = None
        """Record of the checkpoint that is being sealed; None if no seal is in flight."""

    def path_of(self, step: int) -> str:
        """Return the path that the checkpoint of a step has, or would have."""
        return f"{self._directory}/{checkpoint_name(step)}"

    def begin(self, manifest: Manifest) -> None:
        """Announce a seal: from now until it ends, `Store.acquire` may wait for it."""
        with self._changed:
            self.incoming = record_of(manifest)

    def end(self) -> None:
        """Announce that the seal has ended, with success or with an error."""
        with self._changed:
            self.incoming = None
            self._changed.notify_all()

    def compose(self, slot: Slot, train_state: EncodedState, **content: Any) -> Composition:
        """Describe the checkpoint that a slot will be; see `compose`."""
        return compose(slot, train_state, **content)

    def abandon(self, error: BaseException) -> None:
        """Do nothing: no other process waits for the seal that has failed."""

    def seal(
        self, slot: Slot, composition: Composition, model_digests: Sequence[str]
    ) -> StoredCheckpoint:
        """Make a written slot the newest checkpoint, durably: `prepare`, then `publish`."""
        with closing(self.prepare(slot, composition, model_digests)) as prepared:
            return self.publish(prepared)

    def prepare(
        self,
        slot: Slot,
        composition: Composition,
        model_digests: Sequence[str],
        *,
        owners: Sequence[OwnerReference] = (),
        model_boxes: Sequence[ModelBox] = (),
    ) -> Prepared:
        """Make a written slot durable: all files of all its parts, and its manifest last.

        Args:
            slot: Slot to which all tensors have been written.
            composition: Content of the checkpoint besides its tensors.
            model_digests: Digests of the blocks of ``model.safetensors``; empty if the store has
                several owners.
            owners: References to the parts that the other owners have made durable, one for each
                owner that `compose` was told of.
            model_boxes: Boxes of the model that this process has written, with their digests.

        Returns:
            The slot, for `publish`; it is closed by that call, or by the caller.

        Raises:
            StoreBusyError: Readers hold an older checkpoint of the same step.
            StoreError: Files of the slot have been replaced, or this process may not write to the
                store, or the parts are not those of the owners and the generation.
            PinError: An older checkpoint of the same step is pinned.
            gds.StorageError: A file could not be made durable.
        """
        expected = [reference.owner for reference in composition.manifest.owners]
        _require_agreement(owners, expected, slot.context.generation)
        slot.train_state.write_bytes(composition.train_state, 0)
        manifest = replace(
            composition.manifest,
            digests={name: tuple(values) for name, values in slot.digests.items()},
            model_digests=tuple(model_digests),
            parts=slot.part_references,
            owners=tuple(owners),
            model_boxes=tuple(model_boxes),
        )
        encoded = manifest.encode(slot.manifest.size_bytes)
        self._lock.require()
        if self._backend.stat(slot.path) is None:
            slot.require_in_place()  # raises before a failed sync would poison the store
        path = self.path_of(manifest.step)
        replaced = lock_existing(self._backend, path, self._reader_timeout_s)
        prepared = Prepared(slot, path, manifest, replaced)
        try:
            if replaced is not None:
                self._keeping.require_replaceable(path)
            with self._poison.fatal(_NOT_DURABLE):
                slot.sync()
                slot.manifest.write_bytes(encoded, 0)
                slot.manifest.sync()
                slot.folder.sync_names()
        except BaseException:
            prepared.close()
            raise
        return prepared

    def sync(self, slot: Slot) -> None:
        """Make the data of a written slot durable before `prepare`, which then has less to do."""
        with self._poison.fatal(_NOT_DURABLE):
            slot.sync()

    def publish(self, prepared: Prepared) -> StoredCheckpoint:
        """Make a prepared slot the newest checkpoint; durable on return.

        If only the last sync failed, a later process may find the checkpoint all the same.
        """
        slot, path = prepared.slot, prepared.path
        try:
            with self._changed:
                self._lock.require()
                slot.require_in_place()
                leaving = self._claims.leaving(prepared.manifest)  # named, if this fails half way
                with leaving, self._poison.fatal(_NOT_DURABLE):
                    in_the_way = self._backend.stat(path) is not None
                    self._rename_into_place(slot, path, exchange=in_the_way)
                checkpoint = StoredCheckpoint(path, prepared.manifest, slot)
                self._checkpoints.append(checkpoint)
        finally:
            prepared.close()
        with self._changed:
            self.incoming = None
            for old in self._checkpoints[:-_MAX_OPEN]:
                old.close()  # a large keep= must not exhaust the file descriptors
            # The checkpoint is durable. Failures from here on only concern the cleanup after it.
            with suppress(StorageError, StoreError):
                self._withdrawal.trim()
        return checkpoint

    def _rename_into_place(self, slot: Slot, path: str, *, exchange: bool) -> None:
        """Rename a prepared slot to its name as a checkpoint, durably."""
        working = slot.path
        slot.state = SlotState.IN_DOUBT
        if not exchange:
            self._backend.rename(working, path)
            slot.folder.renamed(path)
            self._backend.sync_dir(self._directory)
            slot.published()
            return
        # A checkpoint of the same step exists: it belongs to an abandoned history, has an older
        # layout, or is damaged. Exchanging the two names leaves no instant without a checkpoint.
        self._backend.exchange(working, path)
        slot.folder.renamed(path)
        replaced = [c for c in self._checkpoints if c.path == path]
        for old in replaced:
            old.path = working
        self._backend.sync_dir(self._directory)
        slot.published()
        for old in replaced:
            self._checkpoints.remove(old)
            self._withdrawal.forget(old)
        self._claims.release(path)
        self._refused[:] = [(p, reason) for p, reason in self._refused if p != path]
        self._free.add(working)


def _require_agreement(
    references: Sequence[OwnerReference], expected: Collection[int], generation: int
) -> None:
    """Check that each owner has reported exactly one part, of the right generation."""
    numbers = [reference.owner for reference in references]
    if numbers != sorted(expected) or any(r.generation != generation for r in references):
        found = [(r.owner, r.generation) for r in references]
        raise StoreError(
            errno.EINVAL,
            f"owners and generations reported are {found}, expected owners {sorted(expected)} of "
            f"generation {generation}: every rank must seal the same step",
        )
