"""The store as one rank uses it: every rank makes the same calls, and all agree on their outcome.

The writer has the first directory, with its manifests, model files and train states: a `Store`. It
also has the state of owner 0. Every other rank has the state of one other owner: an `OwnerStore`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from gds import Backend, File, StorageError
from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.owner_parts import check_owner_part
from offload.checkpoint.reading import decode_manifest
from offload.checkpoint.recut.layout import box_of
from offload.checkpoint.recut.source import RecutSource
from offload.distributed.agreement.agreement import Agreement
from offload.distributed.agreement.grant import NO_SEAL, Offer
from offload.distributed.agreement.messages import Json
from offload.distributed.agreement.opening import Plan
from offload.distributed.agreement.sights import Sight
from offload.distributed.far import (
    FarCheckpoint,
    manifest_of_message,
    manifest_texts,
    sealed_manifest,
)
from offload.distributed.node import place_of
from offload.distributed.rank_directories import directories_of_owners, shared_store
from offload.distributed.rank_keeping import RankKeeping
from offload.distributed.rank_sealing import RankSealing, from_message, to_message
from offload.distributed.survey import survey
from offload.distributed.together import together
from offload.errors import CheckpointError, OffloadError, RanksError
from offload.format.boxes import Cut
from offload.format.layout import Layout
from offload.format.manifest import Manifest
from offload.format.names import MODEL_NAME
from offload.format.shares.model_shares import ModelShare
from offload.format.shares.owners import OwnerReference
from offload.format.shares.part_table import owner_sizes
from offload.format.shares.rank_states import join_ranks
from offload.format.train_state import EncodedState
from offload.journal import Journal
from offload.options import Options
from offload.retention.policy import Retention
from offload.store.directories import check_further_directories
from offload.store.opening import StoredCheckpoint, find_stored
from offload.store.owners.claims import NamedParts
from offload.store.owners.slot import OwnerSlot, OwnerSlotState
from offload.store.owners.store import OwnerStore
from offload.store.poison import Poison
from offload.store.quarantine import write_quarantine
from offload.store.recut_room import remove_parts_of_former_owners, require_available
from offload.store.slot import Slot, SlotState
from offload.store.state_store import StateSlot
from offload.store.store import Store

_UNKNOWN = -1
"""Number in an offer that stands for a checkpoint whose manifest cannot be read."""

_LOST = (
    "this rank's part of the last seal could not be made durable, so its state is lost: call "
    "restore() on every rank, which goes on from the newest checkpoint in another part, or restart "
    "the job"
)
"""What a rank says that cannot go on in the slot of an aborted seal."""

ShareOf = Callable[[Layout], ModelShare]
"""Function that returns the boxes of the model that this rank writes, given a layout."""


@dataclass(slots=True)
class _Opened:
    """What this rank has opened."""

    store: Store | None = None
    """The store, on the writer."""

    part: OwnerStore | None = None
    """The parts of an owner, on every other rank."""

    def close(self) -> None:
        if self.store is not None:
            self.store.close()
        if self.part is not None:
            self.part.close()


class RankStore:
    """The store of a training by several ranks, on one of them. The constructor is collective.

    Ranks of another host than the first directory's are told what they need of it.

    Args:
        agreement: Agreement of all ranks.
        backend: Backend of the directories.
        directories: Directories that this rank was given. Owners are dealt over them, unless they
            have a directory already.
        share_of: Function that returns this rank's share of the model.
        keep: Policy that selects the checkpoints to keep.
        options: Settings, of which those of the store are used.
        fresh: Whether to start over although the store has checkpoints.
        settle: Function that takes the shares which a plan gives to the ranks; called before
            anything is opened.

    Raises:
        RanksError: A rank cannot open its share of the store. Every rank raises it, except one that
            has a more precise error of its own.
    """

    def __init__(
        self,
        agreement: Agreement,
        backend: Backend,
        directories: Sequence[str],
        share_of: ShareOf,
        keep: Retention,
        options: Options,
        *,
        fresh: bool,
        settle: Callable[[Plan], None],
    ) -> None:
        self.agreement = agreement
        self.backend = backend
        self._given = tuple(map(os.path.abspath, directories))
        self.directory = self._given[0]
        """The store's first directory."""
        self._home = self.directory
        """Directory of the store that has the parts of this rank's owner."""
        self._share_of = share_of
        self._opened = _Opened()
        self.call = "the constructor"
        """Call of the user that the ranks make, for messages."""
        self._granted: StateSlot | None = None
        self._working = ""
        """Name of the working slot in the first directory."""
        self._slots: dict[int, OwnerSlot] = {}
        """Open parts of checkpoints, by generation."""
        self._manifests: dict[str, Manifest] = {}
        """Manifests of checkpoints as they are on the drive, by path."""
        self._train_states: dict[tuple[str, int], EncodedState] = {}
        """Train states that were sent to this rank, by path and generation of the checkpoint."""
        self._settle = settle
        self._own: list[StoredCheckpoint] = []
        self._refused: list[tuple[str, str]] = []
        self._journal = Journal()
        sight = survey(backend, self._given, fresh=fresh)
        try:
            plan = agreement.open(sight, self._enter(sight, keep, options, fresh=fresh))
            self._open_part(options)
        except BaseException:
            self._opened.close()
            raise
        store, part = self._opened.store, self._opened.part
        self.keeping = RankKeeping(
            agreement,
            backend,
            self.directory,
            lambda: self.checkpoints,
            store,
            is_near=self.is_near,
        )
        """Retention policy and pins, which are the writer's."""
        self.sealing = RankSealing(
            agreement,
            self.directory,
            share_of,
            self._published,
            store,
            part,
            owners=directories_of_owners(plan),
        )
        """What makes checkpoints of the ranks' slots."""
        if self._opened.store is not None and fresh:
            self._refused.clear()

    def _enter(
        self, sight: Sight, keep: Retention, options: Options, *, fresh: bool
    ) -> Callable[[Plan], None]:
        rank = self.agreement.peers.rank

        def enter(plan: Plan) -> None:
            self._settle(plan)
            self._plan = plan
            if plan.near[rank]:
                firsts = [store.directory for store in sight.stores if store.place]
                self.directory = firsts[0] if firsts else self._given[0]
            else:
                self.directory = plan.directories[plan.writer]
            self._home = plan.directories[rank]
            others = self.directories[1:]
            check_further_directories(self.backend, others)
            if rank == plan.writer:
                self._opened.store = Store(
                    self.backend,
                    self.directory,
                    keep=keep,
                    fresh=fresh,
                    train_state_bytes=options.train_state_bytes,
                    reader_timeout_s=options.reader_timeout_s,
                    allow_volatile=options.allow_volatile,
                    allow_remote=options.allow_remote,
                    shared=shared_store(plan, others),
                )

        return enter

    def _open_part(self, options: Options) -> None:
        """Open this rank's parts, and learn which checkpoints there are. Collective."""

        def make(_: object) -> Json:
            return self._offer() | {"place": self._place()}

        def ready(offer: Json) -> Json:
            if self.is_near and self._place() != offer["place"]:
                raise RanksError(
                    f"directory={self.directory!r} is not the directory of "
                    f"{self.agreement.peers.name(0)}, which is {offer['directory']!r}: give the "
                    "same directory on every rank; If "
                    "each rank trains a separate model, pass process_group=offload.SEPARATE"
                )
            if not self.is_writer and self._opened.part is None:
                self._opened.part = OwnerStore(
                    self.backend,
                    self._home,
                    self.owner,
                    store_id=offer["store_id"],
                    allow_volatile=options.allow_volatile,
                    allow_remote=options.allow_remote,
                )
            return self._learn(offer)

        agreed = self.agreement.agree("the constructor", make, ready)
        self._refuse(agreed.notes)
        self.store_id = str(agreed.offer["store_id"])
        """Identity of the store."""

    def _place(self) -> str:
        """Return a text that is the same for all ranks that see the same directory."""
        try:
            return place_of(self.backend, self.directory)
        except OSError:
            return ""

    @property
    def owner(self) -> int:
        """Owner of state that this rank serves."""
        return self._plan.homes[self.agreement.peers.rank]

    @property
    def plan(self) -> Plan:
        """How all ranks have opened the store."""
        return self._plan

    @property
    def is_near(self) -> bool:
        """Whether this rank sees the first directory."""
        return self._plan.near[self.agreement.peers.rank]

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes the first directory."""
        return self._opened.store is not None

    @property
    def directories(self) -> tuple[str, ...]:
        """The first directory of the store, and the others that this rank was given."""
        others = [one for one in self._given if not self.is_near or one != self.directory]
        return (self.directory, *others)

    @property
    def state_directories(self) -> tuple[str, ...]:
        """The directory that has the state of this rank."""
        return (self._home,)

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
        """Usable checkpoint of the highest generation; superseded ones do not count."""
        if self._opened.store is not None:
            return self._opened.store.newest
        current = [c for c in self._own if not c.superseded]
        return max(current, key=lambda c: c.manifest.generation, default=None)

    @property
    def poisoned(self) -> bool:
        """Whether a rename or sync has failed on this rank."""
        store, part = self._opened.store, self._opened.part
        return (store is not None and store.poisoned) or (part is not None and part.poisoned)

    @property
    def journal(self) -> Journal:
        """Events that are logged when this process holds none of the store's locks."""
        return self._opened.store.journal if self._opened.store is not None else self._journal

    def find(self, which: int | str) -> StoredCheckpoint:
        """Return the checkpoint with a step number, or with a path or directory name."""
        return find_stored(self.checkpoints, which, self.directory)

    def warn_of_lost(self) -> None:
        """Warn, on the writer, of checkpoints that other programs have made unusable."""
        if self._opened.store is not None:
            self._opened.store.warn_of_lost()

    def refresh(self, *, warn_of_refused: bool = True) -> None:
        """Compare the checkpoints with the drives, and tell all ranks. Collective."""

        def make(_: object) -> Json:
            if self._opened.store is not None:
                self._opened.store.refresh(warn_of_refused=warn_of_refused)
            return self._offer()

        self.sealing.last_aborted = None  # a restore gives its slot up
        # A rank that announced an error before goes on with this call.
        agreed = self.agreement.agree(self.call, make, self._learn, heeds_errors=False)
        self._refuse(agreed.notes)

    def is_usable(self, checkpoint: StoredCheckpoint) -> bool:
        """Return whether a checkpoint with open files is unchanged and not quarantined."""
        if self._opened.store is not None:
            return self._opened.store.is_usable(checkpoint)
        known = {(each.path, each.manifest.generation) for each in self._own}
        return (checkpoint.path, checkpoint.manifest.generation) in known

    def is_in_place(self, slot: Any) -> bool:
        """Return whether a slot's open files are under its name."""
        try:
            return bool(slot.is_in_place())
        except StorageError:
            return False

    def require_space(self, layout: Layout, num_groups: int) -> None:
        """Check, on the writer, that the drive has room for all slots."""
        if self._opened.store is not None:
            self._opened.store.require_space(layout, num_groups)

    def acquire(self, layout: Layout, num_groups: int) -> StateSlot:
        """Return a slot to write the next generation into, when all ranks have one. Collective.

        After a seal that was aborted, all ranks go on in the slots that they have.

        Raises:
            RanksError: A rank has no slot. Nothing has changed.
            InDoubtError: It is not known what became of the last seal.
        """
        aborted = self.sealing.last_aborted

        def offer() -> Offer:
            store = self._opened.store
            if store is None:
                raise RuntimeError("only the writer makes offers")
            last = self.sealing.last_aborted
            if last is not None and store.poisoned:
                raise RanksError(f"{self.agreement.peers.name(0)}: {_LOST}")
            if (
                last is not None
                and last.slot.state is SlotState.WORKING
                and self.is_in_place(last.slot)
            ):
                slot = os.path.basename(last.slot.path)
                self._granted = last.slot
                return Offer(
                    slot=slot,
                    generation=last.slot.context.generation,
                    in_place_of=last.number,
                    reason=last.reason,
                )
            for directory in self.directories:
                remove_parts_of_former_owners(
                    store.backend,
                    directory,
                    store.store_id,
                    store.named_parts(),
                    {*self._plan.homes},
                )
            own = store.acquire(layout, num_groups)
            self._granted = own
            named = store.named_parts()
            pairs = [(owner, name) for owner, names in named.names.items() for name in names]
            pairs += [(_UNKNOWN, path) for path in named.unknown]
            return Offer(
                slot=os.path.basename(own.path),
                generation=own.context.generation,
                named=tuple(pairs),
            )

        def ready(found: Offer, held: frozenset[str]) -> Json:
            part = self._opened.part
            if part is None:
                return None
            if found.in_place_of != NO_SEAL:
                last = self.sealing.last_aborted
                if last is None or last.slot.state is not OwnerSlotState.WORKING:
                    raise RanksError(_LOST)
                self._granted = last.slot
                return None
            self._release_older(part)
            names = {name for owner, name in found.named if owner == part.owner} | held
            unknown = tuple(path for owner, path in found.named if owner == _UNKNOWN)
            if not self.is_near:
                gone = {
                    path
                    for path, manifest in self._manifests.items()
                    for one in manifest.owners
                    if one.owner == self.owner and one.name not in names
                }
                self._own = [c for c in self._own if c.path not in gone]
            self._granted = part.ready(
                layout,
                found.generation,
                NamedParts({part.owner: frozenset(names)}, unknown),
                written=[(entry.name, entry.box) for entry in self._share_of(layout).entries],
            )
            self._working = found.slot
            return None

        self._granted = None
        try:
            granted = self.agreement.grant(offer, ready, self.call)
        except BaseException:
            slot, self._granted = self._granted, None
            if slot is not None and (aborted is None or slot is not aborted.slot):
                self.release(slot)
            raise
        slot, self._granted = self._granted, None
        if slot is None:
            raise RanksError("this rank was granted no slot: restart the job")
        if granted.offer.is_in_place:
            self.sealing.warn_of_aborted(granted.offer.reason)
        self.sealing.last_aborted = None
        return slot

    def refuse(self, error: Exception) -> None:
        """Take part in `acquire` of all ranks with an error of this one. Collective.

        Raises:
            RanksError: Always, on every rank.
        """

        def fail(*_: object) -> NoReturn:
            """Raise the error of this rank."""
            raise error

        self.agreement.grant(fail, fail, self.call)

    def release(self, slot: Any) -> None:
        """Take back a slot that was acquired and will not be sealed."""
        last = self.sealing.last_aborted
        if last is not None and last.slot is slot:
            self.sealing.last_aborted = None
        if self._opened.store is not None:
            self._opened.store.release(slot)
        elif self._opened.part is not None and self.checkpoint_of(slot) is None:
            self._opened.part.release(slot)

    def expire(self) -> None:
        """Free a slot for the next step, on the writer, if none is free."""
        if self._opened.store is not None:
            self._opened.store.expire()

    def replace_train_state(self, checkpoint: StoredCheckpoint, train_state: EncodedState) -> None:
        """Replace a checkpoint's train states by those of all ranks. Collective."""

        def make(asked: Any) -> Json:
            store = self._opened.store
            if store is None:
                raise RuntimeError("only the writer replaces train states")
            states = join_ranks([from_message(asked[rank]) for rank in sorted(asked)])
            if self.reader_of(checkpoint).read_train_state() != states:
                store.replace_train_state(checkpoint, states)

        ask = to_message(train_state)
        self.agreement.agree("checkpoint()", make, lambda _: None, ask=ask, asks=True)
        self._train_states.pop((checkpoint.path, checkpoint.manifest.generation), None)

    def replace_manifest(self, checkpoint: StoredCheckpoint, manifest: Manifest) -> None:
        """Replace a checkpoint's manifest, on the writer; metrics are the writer's."""
        if self._opened.store is not None:
            self._opened.store.replace_manifest(checkpoint, manifest)
        else:
            checkpoint.manifest = manifest
        known = self._manifests.get(checkpoint.path)
        if known is not None:
            self._manifests[checkpoint.path] = replace(known, metrics=manifest.metrics)

    def fits(self, checkpoint: StoredCheckpoint, cuts: Mapping[str, Cut] | None) -> bool:
        """Return whether this rank has stored its state of a checkpoint in its present cut."""
        owners = self.manifest_of(checkpoint).owners
        if [one.owner for one in owners] != sorted(directories_of_owners(self._plan)):
            return False
        found = cuts or {}
        own = [(spec.name, box_of(spec)) for spec in checkpoint.manifest.layout.parameters]
        return all(name in found and found[name].box == box for name, box in own)

    def recut(self, checkpoint: StoredCheckpoint, cuts: Mapping[str, Cut] | None) -> RecutSource:
        """Return the state of a checkpoint in the present cut of this rank, for reading.

        Raises:
            RanksError: The ranks are on several hosts, so that they do not see all parts.
        """
        manifest = self.manifest_of(checkpoint)
        if not all(self._plan.near):
            raise RanksError(
                f"{checkpoint.path} was made by {len(manifest.owners) + 1} ranks, or in another "
                "sharding, and these ranks are on several hosts, which do not see all of it: "
                "go on with as many ranks as made it, in the same sharding"
            )
        return RecutSource(
            self.backend, checkpoint.path, manifest, cuts, self._searched_for(manifest)
        )

    def _searched_for(self, manifest: Manifest) -> tuple[str, ...]:
        """Return the directories to search for parts of owners; none if one process made it."""
        return self.directories[1:] if manifest.owners else ()

    def require_recut_room(self, layout: Layout, num_groups: int) -> None:
        """Check that there is room for the first slot of another cut, with all parts. Collective.

        Only a store with one directory is checked.

        Raises:
            StoreFullError: There is no room. Nothing has been changed; every rank raises it.
        """
        if len({*self._plan.directories}) > 1:
            return  # parts are on several drives: whoever writes to a full one says so
        store = self._opened.store
        if store is not None:
            needed = store.slot_bytes(layout, num_groups)
        else:
            boxes = [(entry.name, entry.box) for entry in self._share_of(layout).entries]
            needed = sum(owner_sizes(layout, boxes).values())

        def make(asked: Any) -> Json:
            if self._opened.store is None:
                raise RuntimeError("only the writer makes offers")
            return [sum(asked.values()), self._opened.store.available_bytes()]

        agreed = self.agreement.agree("restore()", make, lambda _: None, ask=needed, asks=True)
        require_available(self.directory, *agreed.offer)

    def manifest_of(self, checkpoint: StoredCheckpoint) -> Manifest:
        """Return the manifest of a checkpoint as it is on the drive."""
        return self._manifests.get(checkpoint.path, checkpoint.manifest)

    def slot_of(self, checkpoint: StoredCheckpoint) -> StateSlot:
        """Return the open files of this rank's state in a checkpoint.

        Raises:
            CheckpointError: The rank's part is missing, or not that of the checkpoint.
            gds.StorageError: A file cannot be opened.
        """
        if self._opened.store is not None:
            return self._opened.store.slot_of(checkpoint)
        generation = checkpoint.manifest.generation
        if generation not in self._slots and self._opened.part is not None:
            manifest = self._manifests[checkpoint.path]
            reference = self._reference_of(checkpoint)
            self._slots[generation] = self._opened.part.open(reference, manifest)
        return self._slots[generation]

    def _reference_of(self, checkpoint: StoredCheckpoint) -> OwnerReference:
        """Return the reference of a checkpoint to the part of this rank, which is not the writer.

        Raises:
            CheckpointError: The checkpoint has no part of this rank's owner.
        """
        manifest = self._manifests[checkpoint.path]
        found = next((one for one in manifest.owners if one.owner == self.owner), None)
        if found is None:
            raise CheckpointError(f"{checkpoint.path} has no part of owner {self.owner}")
        return found

    def fetch(self, checkpoint: StoredCheckpoint) -> None:
        """Send the train states of a checkpoint to the ranks that do not see them. Collective."""
        if all(self._plan.near):
            return
        key = checkpoint.path, checkpoint.manifest.generation

        def make(_: object) -> Json:
            try:
                return to_message(self.reader_of(checkpoint).read_train_state())
            except OffloadError:  # the caller reads it on all ranks, and raises the error
                return None

        def ready(message: Json) -> None:
            if not self.is_near and message is not None:
                self._train_states[key] = from_message(message)

        self._train_states.clear()
        self.agreement.agree("restore()", make, ready, heeds_errors=False)

    def checkpoint_of(self, slot: Any) -> StoredCheckpoint | None:
        """Return the usable checkpoint that a slot belongs to; None if it belongs to none."""
        if self._opened.store is not None:
            return self._opened.store.checkpoint_of(slot)
        generations = [g for g, own in self._slots.items() if own is slot]
        return next((c for c in self._own if c.manifest.generation in generations), None)

    def reader_of(self, checkpoint: StoredCheckpoint) -> Checkpoint:
        """Return a checkpoint as readers see it, with the train state of this rank."""
        manifest = self.manifest_of(checkpoint)
        peers = self.agreement.peers
        if not self.is_near:
            return FarCheckpoint(
                self.backend,
                checkpoint.path,
                manifest,
                self.directories[1:],
                self._train_states.get((checkpoint.path, manifest.generation)),
                rank=peers.rank,
                num_ranks=peers.size,
            )
        return Checkpoint(
            self.backend,
            checkpoint.path,
            manifest,
            self._searched_for(manifest),
            rank=peers.rank,
            num_ranks=peers.size,
        )

    def model_of(self, checkpoint: StoredCheckpoint) -> File:
        """Return the model file of a checkpoint, open for this rank alone; the caller closes it."""
        return self.backend.open(f"{checkpoint.path}/{MODEL_NAME}")

    def working_model(self, slot: StateSlot) -> tuple[File, Callable[[], None]]:
        """Return the model file of the working slot, open for writing, and what closes it.

        A seal writes it while later steps write other slots, so each seal has a file of its own.

        Raises:
            gds.StorageError: The file cannot be opened.
        """
        if isinstance(slot, Slot):
            return slot.model, lambda: None  # closed with its slot
        file = self.backend.open(f"{self.directory}/{self._working}/{MODEL_NAME}", writable=True)
        return file, file.close

    def quarantine(self, checkpoint: StoredCheckpoint, reason: str) -> None:
        """Exclude a damaged checkpoint from use.

        The writer marks it. Another rank marks the part that is damaged.
        """
        if self._opened.store is not None:
            self._opened.store.quarantine(checkpoint, reason)
            return
        part, slot = self._opened.part, self._slots.get(checkpoint.manifest.generation)
        self._own = [one for one in self._own if one is not checkpoint]
        self._refused.append((checkpoint.path, reason))
        if part is not None and slot is not None and slot.path in reason:
            part.quarantine(slot, reason)
            return
        # A rank that reads another cut may have read any owner's part.
        owners = self.manifest_of(checkpoint).owners
        parts = [one.path_in(where) for one in owners for where in self.directories]
        for path in (checkpoint.path, *parts):
            if f"{path}/" in reason:
                with suppress(StorageError):  # a later process finds the damage again
                    write_quarantine(self.backend, path, reason, Poison(path))

    def withdraw_newer(self, checkpoint: StoredCheckpoint) -> None:
        """Withdraw, durably, every checkpoint that is newer than the given one. Collective."""

        def withdraw() -> None:
            if self._opened.store is not None:
                self._opened.store.withdraw_newer(checkpoint)

        together(self.agreement, self.call, withdraw)
        generation = checkpoint.manifest.generation
        self._own = [c for c in self._own if c.manifest.generation <= generation]

    def _published(
        self, path: str, slot: OwnerSlot, composed: Manifest, reference: OwnerReference
    ) -> StoredCheckpoint:
        """Record, on a rank that is not the writer, that its slot belongs to a checkpoint now.

        Args:
            path: Path of the checkpoint.
            slot: Slot with this rank's state.
            composed: Manifest that this rank has composed.
            reference: Reference to this rank's part.
        """
        if self.is_near:
            manifest = decode_manifest(self.backend, path)
        else:
            owners = sorted(directories_of_owners(self.plan))
            manifest = sealed_manifest(composed, reference, owners)
        self._slots[manifest.generation] = slot
        self._own = [
            c
            for c in self._own
            if c.path != path and (not self.is_near or self.backend.stat(c.path))
        ]
        checkpoint = self._adopt(path, manifest)
        self._own.append(checkpoint)
        return checkpoint

    def close(self) -> None:
        """Close all files and release the locks. Idempotent."""
        self._opened.close()

    def _release_older(self, part: OwnerStore) -> None:
        """Close the parts of checkpoints before the newest, so that they can be written again.

        The next step reads the part of the newest checkpoint, or one that is being sealed.
        """
        newest = self.newest
        for generation in [*self._slots]:
            if newest is None or generation < newest.manifest.generation:
                part.release(self._slots.pop(generation))

    def _offer(self) -> Json:
        """Return what the writer tells all ranks of the checkpoints."""
        store = self._opened.store
        if store is None:
            raise RuntimeError("only the writer makes offers")
        return {
            "store_id": store.store_id,
            "directory": self.directory,
            "checkpoints": [
                [c.path, c.manifest.generation, c.superseded] for c in store.checkpoints
            ],
            "refused": [list(pair) for pair in store.refused],
            "manifests": {}
            if all(self._plan.near)
            else manifest_texts(self.backend, store.checkpoints),
        }

    def _learn(self, offer: Json) -> Json:
        """Take over the checkpoints that the writer has found.

        Returns:
            Path of each that this rank cannot use, with the reason.
        """
        unusable: list[list[str]] = []
        for path in [*self._manifests]:
            if path not in {found for found, _, _ in offer["checkpoints"]}:
                del self._manifests[path]
        if self.is_writer:
            return unusable
        known = {(c.path, c.manifest.generation): c for c in self._own}
        self._own = []
        self._refused = [(path, reason) for path, reason in offer["refused"]]
        for path, generation, superseded in offer["checkpoints"]:
            checkpoint = known.get((path, generation)) if self.is_near else None
            if checkpoint is None:
                if self.is_near:
                    manifest = decode_manifest(self.backend, path)
                else:
                    manifest = manifest_of_message(offer["manifests"], path)
                if manifest.generation != generation:
                    raise CheckpointError(
                        f"{path} is of generation {manifest.generation}, expected {generation}: "
                        "another program has replaced it"
                    )
                try:
                    checkpoint = self._adopt(path, manifest)
                except CheckpointError as error:
                    unusable.append([path, str(error)])
                    continue
            checkpoint.superseded = superseded
            self._own.append(checkpoint)
        return unusable

    def _refuse(self, notes: Mapping[int, Json]) -> None:
        """Pass over the checkpoints that a rank cannot use, on all ranks."""
        for rank, unusable in sorted(notes.items()):
            for path, reason in unusable:
                text = f"{self.agreement.peers.name(rank)}: {reason}"
                store = self._opened.store
                if store is None:
                    self._own = [one for one in self._own if one.path != path]
                    self._refused.append((path, text))
                    continue
                for checkpoint in [one for one in store.checkpoints if one.path == path]:
                    store.refuse(checkpoint, text)

    def _adopt(self, path: str, manifest: Manifest) -> StoredCheckpoint:
        """Return a checkpoint with the description of this rank's state in it."""
        self._manifests[path] = manifest
        reference = next((one for one in manifest.owners if one.owner == self.owner), None)
        if reference is None:
            return StoredCheckpoint(path, manifest, None)  # it does not fit, which `restore` says
        part = reference.path_in(self._home)
        table = check_owner_part(self.backend, part, manifest, reference, path)
        own = replace(
            manifest,
            layout=table.layout,
            scalars=table.scalars,
            digests=table.digests,
            model_boxes=table.model_boxes,
        )
        return StoredCheckpoint(path, own, None)
