"""What a rank knows of the store's checkpoints: the writer finds them, and tells the others."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from gds import Backend, StorageError
from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.owner_parts import check_owner_part
from offload.checkpoint.reading import decode_manifest, directories_of_parts
from offload.distributed.agreement.peers import Json
from offload.distributed.rank_opening import Opened
from offload.distributed.rank_sealing import from_message, to_message
from offload.errors import CheckpointError, OffloadError, RanksError
from offload.format.manifest import Manifest, decode
from offload.format.names import MANIFEST_NAME, part_name
from offload.format.shares.owners import OwnerReference
from offload.format.train_state import EncodedState
from offload.store.opening import StoredCheckpoint
from offload.store.owner_store import OwnerStore
from offload.store.quarantine import write_quarantine
from offload.store.slots.slot import OwnerSlot
from offload.store.state_store import StateSlot
from offload.store.store_errors import Poison


class RankCheckpoints:
    """The checkpoints of a store of several ranks, on one of them.

    On the writer they are those of its `Store`. Every other rank has a list of its own, in which
    each checkpoint has the layout of that rank's state, and open files of its own parts. Any method
    may be called while the thread of a seal calls `published`.
    """

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self._lock = threading.Lock()
        """Guards the fields below wherever one is changed that depends on what it was, or is gone
        through. No file is touched and no other lock is taken while it is held."""
        self._own: list[StoredCheckpoint] = []
        self._refused: list[tuple[str, str]] = []
        self._slots: dict[int, OwnerSlot] = {}
        """Open parts of checkpoints, by generation."""
        self._manifests: dict[str, Manifest] = {}
        """Manifests of checkpoints as they are on the drive, by path."""
        self._train_states: dict[tuple[str, int], EncodedState] = {}
        """Train states that were sent to this rank, by path and generation of the checkpoint."""

    @property
    def checkpoints(self) -> list[StoredCheckpoint]:
        """All usable checkpoints, oldest first, with the layout of this rank's state."""
        return self._opened.store.checkpoints if self._opened.store is not None else self._own

    @property
    def refused(self) -> list[tuple[str, str]]:
        """Paths of directories that look like checkpoints but are not usable, with the reasons."""
        return self._opened.store.refused if self._opened.store is not None else self._refused

    @property
    def newest(self) -> StoredCheckpoint | None:
        """Usable checkpoint with state of the highest generation; superseded ones do not count."""
        if self._opened.store is not None:
            return self._opened.store.newest
        with self._lock:
            current = [c for c in self._own if not c.superseded and c.manifest.has_state]
        return max(current, key=lambda c: c.manifest.generation, default=None)

    def is_usable(self, checkpoint: StoredCheckpoint) -> bool:
        """Return whether a checkpoint with open files is unchanged and not quarantined."""
        if self._opened.store is not None:
            return self._opened.store.is_usable(checkpoint)
        with self._lock:
            known = {(each.path, each.manifest.generation) for each in self._own}
        return (checkpoint.path, checkpoint.manifest.generation) in known

    def manifest_of(self, checkpoint: StoredCheckpoint) -> Manifest:
        """Return the manifest of a checkpoint as it is on the drive."""
        return self._manifests.get(checkpoint.path, checkpoint.manifest)

    def slot_of(self, checkpoint: StoredCheckpoint) -> StateSlot:
        """Return the open files of this rank's state in a checkpoint."""
        if self._opened.store is not None:
            return self._opened.store.slot_of(checkpoint)
        generation = checkpoint.manifest.generation
        if generation not in self._slots and self._opened.part is not None:
            manifest = self._manifests[checkpoint.path]
            reference = self._reference_in(manifest)
            if reference is None:
                owner = self._opened.owner
                raise CheckpointError(f"{checkpoint.path} has no part of owner {owner}")
            slot = self._opened.part.open(reference, manifest)
            with self._lock:
                self._slots[generation] = slot
        return self._slots[generation]

    @contextmanager
    def as_checkpoint(
        self, path: str, manifest: Manifest, own: Manifest, slot: StateSlot
    ) -> Iterator[StoredCheckpoint]:
        """Use a slot that is about to become a checkpoint as one, in a ``with`` block.

        It is not among `checkpoints`.
        """
        with self._lock:
            self._manifests[path] = manifest
            if isinstance(slot, OwnerSlot):
                self._slots[manifest.generation] = slot
        try:
            yield StoredCheckpoint(path, own, None if isinstance(slot, OwnerSlot) else slot)
        finally:
            with self._lock:
                self._manifests.pop(path, None)
                if isinstance(slot, OwnerSlot):
                    self._slots.pop(manifest.generation, None)

    def _reference_in(self, manifest: Manifest) -> OwnerReference | None:
        """Return the reference to the part of this rank, which is not the writer."""
        return next((one for one in manifest.owners if one.owner == self._opened.owner), None)

    def checkpoint_of(self, slot: Any) -> StoredCheckpoint | None:
        """Return the usable checkpoint that a slot belongs to; None if it belongs to none."""
        if self._opened.store is not None:
            return self._opened.store.checkpoint_of(slot)
        with self._lock:
            generations = [g for g, own in self._slots.items() if own is slot]
            return next((c for c in self._own if c.manifest.generation in generations), None)

    def reader_of(self, checkpoint: StoredCheckpoint) -> Checkpoint:
        """Return a checkpoint as readers see it, with the train state of this rank."""
        manifest = self.manifest_of(checkpoint)
        peers = self._opened.agreement.peers
        is_near = self._opened.is_near
        found = (Checkpoint if is_near else FarCheckpoint)(
            self._opened.backend,
            checkpoint.path,
            manifest,
            self.further_of(manifest) if is_near else self._opened.further,
            rank=peers.rank,
            num_ranks=peers.size,
        )
        if isinstance(found, FarCheckpoint):
            found.sent = self._train_states.get((found.path, manifest.generation))
        return found

    def fetch(self, checkpoint: StoredCheckpoint) -> None:
        """Send the train states of a checkpoint to the ranks that do not see them. Collective."""
        if all(self._opened.plan.near):
            return
        key = checkpoint.path, checkpoint.manifest.generation

        def make(_: object) -> Json:
            """Read the train states on the writer."""
            try:
                return to_message(self.reader_of(checkpoint).read_train_state())
            except OffloadError:  # the caller reads it on all ranks, and raises the error
                return None

        def ready(message: Json) -> None:
            """Keep them on a rank that does not see the first directory."""
            if not self._opened.is_near and message is not None:
                self._train_states[key] = from_message(message)

        self._train_states.clear()
        self._opened.agreement.agree("restore()", make, ready, heeds_errors=False)

    def replace_manifest(self, checkpoint: StoredCheckpoint, manifest: Manifest) -> None:
        """Replace a checkpoint's manifest, on the writer; metrics are the writer's."""
        if self._opened.store is not None:
            self._opened.store.replace_manifest(checkpoint, manifest)
        else:
            checkpoint.manifest = manifest
        with self._lock:
            known = self._manifests.get(checkpoint.path)
            if known is not None:
                self._manifests[checkpoint.path] = replace(known, metrics=manifest.metrics)

    def quarantine(self, checkpoint: StoredCheckpoint, reason: str) -> None:
        """Exclude a damaged checkpoint from use.

        The writer marks it. Another rank marks the part that is damaged.
        """
        if self._opened.store is not None:
            self._opened.store.quarantine(checkpoint, reason)
            return
        part, slot = self._opened.part, self._slots.get(checkpoint.manifest.generation)
        with self._lock:
            self._own = [one for one in self._own if one is not checkpoint]
            self._refused.append((checkpoint.path, reason))
        if part is not None and slot is not None and slot.path in reason:
            part.quarantine(slot, reason)
            return
        # A rank that reads another cut may have read any owner's part.
        manifest = self.manifest_of(checkpoint)
        owners = manifest.owners
        parts = [one.path_in(where) for one in owners for where in self._opened.directories]
        # The parts of a checkpoint of one process have no marks of their own.
        is_spread = any(f"/{part.name}/" in reason for part in manifest.parts)
        for path in (checkpoint.path, *parts):
            if f"{path}/" in reason or (is_spread and path == checkpoint.path):
                with suppress(StorageError):  # a later process finds the damage again
                    write_quarantine(self._opened.backend, path, reason, Poison(path))

    def withdraw_newer(self, checkpoint: StoredCheckpoint) -> None:
        """Withdraw what is newer than a checkpoint on the writer, and forget it on every other."""
        if self._opened.store is not None:
            self._opened.store.withdraw_newer(checkpoint)
        generation = checkpoint.manifest.generation
        with self._lock:
            self._own = [c for c in self._own if c.manifest.generation <= generation]

    def forget_recycled(self, names: Collection[str]) -> None:
        """Forget the checkpoints whose part of this rank's owner may be written again."""
        owner = self._opened.owner
        with self._lock:
            gone = {
                path
                for path, manifest in self._manifests.items()
                for one in manifest.owners
                if one.owner == owner and one.name not in names
            }
            self._own = [c for c in self._own if c.path not in gone]

    def further_of(self, manifest: Manifest) -> tuple[str, ...]:
        """Return the directories to search for parts of owners.

        If one process has made the checkpoint, these are the directories of its parts, in order.
        """
        further = self._opened.further
        if manifest.owners:
            return further
        return tuple(directories_of_parts(self._opened.backend, manifest, further))

    def published(
        self, path: str, slot: OwnerSlot, composed: Manifest, reference: OwnerReference
    ) -> StoredCheckpoint:
        """Record, on a rank that is not the writer, that its slot belongs to a checkpoint now."""
        if self._opened.is_near:
            manifest = decode_manifest(self._opened.backend, path)
        else:
            owners = sorted(self._opened.owners)
            manifest = sealed_manifest(composed, reference, owners)
        checkpoint = self._as_this_rank_has_it(path, manifest)
        gone = {path}
        if self._opened.is_near:
            gone |= {c.path for c in [*self._own] if self._opened.backend.stat(c.path) is None}
        with self._lock:
            self._slots[manifest.generation] = slot
            self._manifests[path] = manifest
            self._own = [*(c for c in self._own if c.path not in gone), checkpoint]
        return checkpoint

    def release_older(self, part: OwnerStore) -> None:
        """Close the parts of checkpoints before the newest, so that they can be written again.

        The next step reads the part of the newest checkpoint, or one that is being sealed.
        """
        newest = self.newest
        with self._lock:
            older = [
                self._slots.pop(generation)
                for generation in [*self._slots]
                if newest is None or generation < newest.manifest.generation
            ]
        for slot in older:
            part.release(slot)

    def offer(self) -> Json:
        """Return what the writer tells all ranks of the checkpoints."""
        store = self._opened.writer
        return {
            "store_id": store.store_id,
            "directory": self._opened.directory,
            "checkpoints": [
                [c.path, c.manifest.generation, c.superseded] for c in store.checkpoints
            ],
            "refused": [list(pair) for pair in store.refused],
            "manifests": {}
            if all(self._opened.plan.near)
            else manifest_texts(self._opened.backend, store.checkpoints),
        }

    def learn(self, offer: Json) -> Json:
        """Take over the checkpoints that the writer has found."""
        unusable: list[list[str]] = []
        offered = {path for path, _, _ in offer["checkpoints"]}
        with self._lock:
            self._manifests = {p: one for p, one in self._manifests.items() if p in offered}
            if self._opened.store is not None:
                return unusable
            known = {(c.path, c.manifest.generation): c for c in self._own}
            self._own = []
            self._refused = [(path, reason) for path, reason in offer["refused"]]
        for path, generation, superseded in offer["checkpoints"]:
            checkpoint = known.get((path, generation)) if self._opened.is_near else None
            if checkpoint is None:
                if self._opened.is_near:
                    manifest = decode_manifest(self._opened.backend, path)
                else:
                    manifest = decode(offer["manifests"][path].encode(), path)
                if manifest.generation != generation:
                    raise CheckpointError(
                        f"{path} is of generation {manifest.generation}, expected {generation}: "
                        "another program has replaced it"
                    )
                with self._lock:
                    self._manifests[path] = manifest
                try:
                    checkpoint = self._as_this_rank_has_it(path, manifest)
                except CheckpointError as error:
                    unusable.append([path, str(error)])
                    continue
            checkpoint.superseded = superseded
            with self._lock:
                self._own.append(checkpoint)
        return unusable

    def pass_over(self, notes: Mapping[int, Json]) -> None:
        """Pass over the checkpoints that a rank cannot use, on all ranks."""
        for rank, unusable in sorted(notes.items()):
            for path, reason in unusable:
                text = f"{self._opened.agreement.peers.name(rank)}: {reason}"
                store = self._opened.store
                if store is None:
                    with self._lock:
                        self._own = [one for one in self._own if one.path != path]
                        self._refused.append((path, text))
                    continue
                for checkpoint in [one for one in store.checkpoints if one.path == path]:
                    store.refuse(checkpoint, text)

    def _as_this_rank_has_it(self, path: str, manifest: Manifest) -> StoredCheckpoint:
        """Return a checkpoint with the description of this rank's state in it."""
        reference = self._reference_in(manifest)
        if reference is None:
            return StoredCheckpoint(path, manifest, None)  # it does not fit, which `restore` says
        part = reference.path_in(self._opened.home)
        table = check_owner_part(self._opened.backend, part, manifest, reference, path)
        own = replace(
            manifest,
            layout=table.layout,
            scalars=table.scalars,
            digests=table.digests,
            model_boxes=table.model_boxes,
        )
        return StoredCheckpoint(path, own, None)


class FarCheckpoint(Checkpoint):
    """A checkpoint whose directory is on another host."""

    sent: EncodedState | None = None
    """Train states of all ranks; None if this rank has not been sent them."""

    def read_train_state(self) -> EncodedState:
        """Return the train states as they are stored."""
        if self.sent is None:
            raise RanksError(
                f"{self.path} is on another host, and its train state has not been sent here: "
                "restore() sends it, or ask on a rank that sees the directory"
            )
        return self.sent


def manifest_texts(backend: Backend, checkpoints: Sequence[StoredCheckpoint]) -> Json:
    """Return the manifests of checkpoints for a message, by path."""
    texts = {}
    for checkpoint in checkpoints:
        with backend.open(f"{checkpoint.path}/{MANIFEST_NAME}") as file:
            texts[checkpoint.path] = file.read_bytes(0, file.size_bytes).decode().rstrip()
    return texts


def sealed_manifest(
    manifest: Manifest, reference: OwnerReference, owners: Sequence[int]
) -> Manifest:
    """Return what a far rank knows of a manifest that has just been published.

    It knows the reference to its own part only; those of the others have no digests.
    """
    return replace(
        manifest,
        owners=tuple(
            reference
            if owner == reference.owner
            else OwnerReference(owner, "", part_name(1), manifest.generation, "0" * 32)
            for owner in owners
        ),
    )
