"""The store as one rank uses it: every rank makes the same calls, and all agree on their outcome.

The writer has the first directory, with its manifests, model files and train states: a `Store`. It
also has the state of owner 0. Every other rank has the state of one other owner: an `OwnerStore`.
`rank_opening` opens them, `rank_checkpoints` knows the checkpoints, `rank_granting` hands out the
slots of the next generation, and `rank_sealing` makes them one checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from gds import Backend, File
from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.recut.source import Recode, RecutSource
from offload.checkpoint.state_owners import Reach, names_with_state
from offload.distributed.agreement.agreement import Agreement
from offload.distributed.agreement.messages import Json
from offload.distributed.agreement.opening import Plan
from offload.distributed.rank_checkpoints import RankCheckpoints
from offload.distributed.rank_granting import RankGranting
from offload.distributed.rank_keeping import RankKeeping
from offload.distributed.rank_opening import open_first
from offload.distributed.rank_sealing import RankSealing, from_message, to_message
from offload.distributed.recut_rooms import require_rooms
from offload.format.boxes import Cut
from offload.format.layout import Layout
from offload.format.manifest import Manifest
from offload.format.names import MODEL_NAME
from offload.format.shares.model_shares import ModelShare
from offload.format.shares.part_table import owner_sizes
from offload.format.train_state import EncodedState, join_ranks
from offload.journal import Journal
from offload.model.buffer_watch import BufferWatch
from offload.options import Options
from offload.retention.policy import Retention
from offload.store.opening import StoredCheckpoint, find_stored
from offload.store.owner_store import OwnerStore
from offload.store.slots.slot import Slot
from offload.store.state_store import StateSlot
from offload.store.store import Store

ShareOf = Callable[[Layout], ModelShare]
"""Function that returns the boxes of the model that this rank writes, given a layout."""


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
        lay_out: Function that returns a layout with the shard file of the model that a new slot of
            this rank has, if it has one.
        watch: Watch over the model's buffers.

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
        lay_out: Callable[[Layout], Layout],
        watch: BufferWatch,
    ) -> None:
        self.agreement = agreement
        self._lay_out = lay_out
        self.backend = backend
        self._share_of = share_of
        self.call = "the constructor"
        """Call of the user that the ranks make, for messages."""
        self._journal = Journal()
        self._opened = opened = open_first(
            agreement,
            backend,
            tuple(map(os.path.abspath, directories)),
            keep,
            options,
            fresh=fresh,
            settle=settle,
        )
        self.directory = opened.directory
        """The store's first directory."""
        self._known = RankCheckpoints(opened)
        try:
            self._open_parts(options)
        except BaseException:
            opened.close()
            raise
        self.keeping = RankKeeping(
            agreement,
            backend,
            self.directory,
            lambda: self.checkpoints,
            opened.store,
            is_near=self.is_near,
        )
        """Retention policy and pins, which are the writer's."""
        self.sealing = RankSealing(
            agreement,
            self.directory,
            share_of,
            self._known.published,
            opened.store,
            opened.part,
            owners=opened.owners,
        )
        """What makes checkpoints of the ranks' slots."""
        self._granting = RankGranting(opened, self._known, self.sealing, share_of, watch)

    def _open_parts(self, options: Options) -> None:
        """Open the parts of all ranks, and learn which checkpoints there are. Collective."""

        def make(_: object) -> Json:
            """Tell all ranks, on the writer, which store it is."""
            return self._known.offer() | {"place": self._opened.place}

        def ready(offer: Json) -> Json:
            """Open the parts of this rank's owner."""
            self._opened.open_part(offer, options)
            return self._known.learn(offer)

        agreed = self.agreement.agree("the constructor", make, ready)
        self._known.pass_over(agreed.notes)

    @property
    def store_id(self) -> str:
        """Identity of the store."""
        return self.served.store_id

    @property
    def served(self) -> Store | OwnerStore:
        """What this rank writes: the store on the writer, else the parts of an owner."""
        served = self._opened.store or self._opened.part
        if served is None:
            raise RuntimeError("this rank has neither the store nor a part of it")
        return served

    @property
    def plan(self) -> Plan:
        """How all ranks have opened the store."""
        return self._opened.plan

    @property
    def is_near(self) -> bool:
        """Whether this rank sees the first directory."""
        return self._opened.is_near

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes the first directory."""
        return self._opened.store is not None

    @property
    def directories(self) -> tuple[str, ...]:
        """The first directory of the store, and the others that this rank was given."""
        return self._opened.directories

    @property
    def state_directories(self) -> tuple[str, ...]:
        """The directory that has the state of this rank."""
        return (self._opened.home,)

    @property
    def checkpoints(self) -> list[StoredCheckpoint]:
        """All usable checkpoints, oldest first, with the layout of this rank's state."""
        return self._known.checkpoints

    @property
    def refused(self) -> list[tuple[str, str]]:
        """Paths of directories that look like checkpoints but are not usable, with the reasons."""
        return self._known.refused

    @property
    def newest(self) -> StoredCheckpoint | None:
        """Usable checkpoint of the highest generation; superseded ones do not count."""
        return self._known.newest

    @property
    def poisoned(self) -> bool:
        """Whether a rename or sync has failed on this rank."""
        return self._opened.poisoned

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
            """Compare on the writer, and tell what it has found."""
            if self._opened.store is not None:
                self._opened.store.refresh(warn_of_refused=warn_of_refused)
            return self._known.offer()

        self.sealing.last_aborted = None  # a restore gives its slot up
        # A rank that announced an error before goes on with this call.
        agreed = self.agreement.agree(self.call, make, self._known.learn, heeds_errors=False)
        self._known.pass_over(agreed.notes)

    def is_usable(self, checkpoint: StoredCheckpoint) -> bool:
        """Return whether a checkpoint with open files is unchanged and not quarantined."""
        return self._known.is_usable(checkpoint)

    def require_space(self, layout: Layout, num_groups: int) -> None:
        """Check, on the writer, that the drive has room for all slots."""
        if self._opened.store is not None:
            self._opened.store.require_space(self._lay_out(layout), num_groups)

    def acquire(self, layout: Layout, num_groups: int, *, is_new: bool = False) -> StateSlot:
        """Return a slot to write the next generation into; see `RankGranting.acquire`."""
        laid_out = self._lay_out(layout)
        return self._granting.acquire(laid_out, num_groups, self.call, is_new=is_new)

    def refuse(self, error: Exception) -> None:
        """Take part in `acquire` of all ranks with an error; see `RankGranting.refuse`."""
        self._granting.refuse(error, self.call)

    def release(self, slot: Any) -> None:
        """Take back a slot that was acquired and will not be sealed."""
        self._granting.release(slot)

    def expire(self) -> None:
        """Free a slot for the next step, on the writer, if none is free."""
        if self._opened.store is not None:
            self._opened.store.expire()

    def replace_train_state(self, checkpoint: StoredCheckpoint, train_state: EncodedState) -> None:
        """Replace a checkpoint's train states by those of all ranks. Collective."""

        def make(asked: Any) -> Json:
            """Join the train states of all ranks, on the writer."""
            store = self._opened.writer
            states = join_ranks([from_message(asked[rank]) for rank in sorted(asked)])
            if self.reader_of(checkpoint).read_train_state() != states:
                store.replace_train_state(checkpoint, states)

        ask = to_message(train_state)
        self.agreement.agree("checkpoint()", make, lambda _: None, ask=ask, asks=True)
        self._known.forget_train_state(checkpoint)

    def replace_manifest(self, checkpoint: StoredCheckpoint, manifest: Manifest) -> None:
        """Replace a checkpoint's manifest, on the writer; metrics are the writer's."""
        self._known.replace_manifest(checkpoint, manifest)

    def fits(self, checkpoint: StoredCheckpoint, cuts: Mapping[str, Cut] | None) -> bool:
        """Return whether this rank has stored its state of a checkpoint in its present cut."""
        owners = self._known.manifest_of(checkpoint).owners
        if [one.owner for one in owners] != sorted(self._opened.owners):
            return False
        found = cuts or {}
        own = [(spec.name, spec.box) for spec in checkpoint.manifest.layout.parameters]
        return all(name in found and found[name].box == box for name, box in own)

    def seen_state(self, checkpoint: StoredCheckpoint) -> Collection[int]:
        """Return which parameters have state that this rank sees, if ranks are on several hosts.

        Raises the errors of `names_with_state`.
        """
        if all(self.plan.near):
            return ()
        manifest = self._known.manifest_of(checkpoint)
        names = names_with_state(
            self.backend,
            checkpoint.path,
            manifest,
            self._known.further_of(manifest),
            sees_first=self.is_near,
        )
        return [n for n, tensor in enumerate(manifest.layout.model) if tensor.name in names]

    def recut(
        self,
        checkpoint: StoredCheckpoint,
        cuts: Mapping[str, Cut] | None,
        *,
        with_state: Collection[int] = (),
        recode: Recode | None = None,
        shares: Sequence[int] = (1,),
    ) -> RecutSource:
        """Return the state of a checkpoint in the present cut of this rank, for reading.

        Raises:
            RanksError: The ranks are on several hosts, and this one does not see what it needs.
        """
        del shares  # each rank has one directory
        manifest = self._known.manifest_of(checkpoint)
        reach = None
        if not all(self.plan.near):
            model = manifest.layout.model
            names = (tensor.name for n, tensor in enumerate(model) if n in with_state)
            reach = Reach(self.is_near, frozenset(names))
        further = self._known.further_of(manifest)
        return RecutSource(
            self.backend, checkpoint.path, manifest, cuts, further, recode=recode, reach=reach
        )

    def require_recut_room(self, layout: Layout, num_groups: int) -> None:
        """Check that all drives have room for the first slot of another cut. Collective.

        Raises the errors of `require_rooms`.
        """
        store, layout = self._opened.store, self._lay_out(layout)
        if store is not None:
            needed = store.slot_bytes(layout, num_groups)
        else:
            boxes = [(entry.name, entry.box) for entry in self._share_of(layout).entries]
            needed = sum(owner_sizes(layout, boxes).values())
        require_rooms(self._opened, needed)

    def manifest_of(self, checkpoint: StoredCheckpoint) -> Manifest:
        """Return the manifest of a checkpoint as it is on the drive."""
        return self._known.manifest_of(checkpoint)

    def slot_of(self, checkpoint: StoredCheckpoint) -> StateSlot:
        """Return the open files of this rank's state; see `RankCheckpoints.slot_of`."""
        return self._known.slot_of(checkpoint)

    def fetch(self, checkpoint: StoredCheckpoint) -> None:
        """Send the train states of a checkpoint to the ranks that do not see them. Collective."""
        self._known.fetch(checkpoint)

    def as_checkpoint(
        self, path: str, manifest: Manifest, own: Manifest, slot: StateSlot
    ) -> AbstractContextManager[StoredCheckpoint]:
        """Use a slot that is about to become a checkpoint as one, in a ``with`` block."""
        return self._known.as_checkpoint(path, manifest, own, slot)

    def checkpoint_of(self, slot: Any) -> StoredCheckpoint | None:
        """Return the usable checkpoint that a slot belongs to; None if it belongs to none."""
        return self._known.checkpoint_of(slot)

    def reader_of(self, checkpoint: StoredCheckpoint) -> Checkpoint:
        """Return a checkpoint as readers see it, with the train state of this rank."""
        return self._known.reader_of(checkpoint)

    def model_of(self, checkpoint: StoredCheckpoint) -> File:
        """Return the file beside a checkpoint's manifest that has tensors of the model.

        It is open for this rank alone; the caller closes it.
        """
        name = self.manifest_of(checkpoint).layout.model_name
        return self.backend.open(f"{checkpoint.path}/{name}")

    def working_model(self, slot: StateSlot) -> tuple[File, Callable[[], None]]:
        """Return the model file of the working slot, open for writing, and what closes it.

        A seal writes it while later steps write other slots, so each seal has a file of its own.
        """
        if isinstance(slot, Slot):
            return slot.model, lambda: None  # closed with its slot
        file = self.backend.open(
            f"{self.directory}/{self.sealing.shared_of(slot).folder}/{MODEL_NAME}", writable=True
        )
        return file, file.close

    def quarantine(self, checkpoint: StoredCheckpoint, reason: str) -> None:
        """Exclude a damaged checkpoint from use; see `RankCheckpoints.quarantine`."""
        self._known.quarantine(checkpoint, reason)

    def withdraw_newer(self, checkpoint: StoredCheckpoint) -> None:
        """Withdraw what is newer than a checkpoint on the writer, and forget it on every other."""
        if self._opened.store is not None:
            self._opened.store.withdraw_newer(checkpoint)
        self._known.forget_newer(checkpoint)

    def close(self) -> None:
        """Close all files and release the locks. Idempotent."""
        self._opened.close()
