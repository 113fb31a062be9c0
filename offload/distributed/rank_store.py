"""The store as one rank uses it: every rank makes the same calls, and all agree on their outcome.

The writer has the first directory, with its manifests, model files and train states: a `Store`. It
also has the state of owner 0. Every other rank has the state of one other owner: an `OwnerStore`.
`rank_opening` opens them, `rank_checkpoints` knows the checkpoints, `rank_granting` hands out the
slots of the next generation, and `rank_sealing` makes them one checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from gds import Backend, File
from offload.checkpoint.recut.source import Recode, RecutSource
from offload.checkpoint.state_owners import Reach, names_with_state
from offload.distributed.agreement.agreement import Agreement
from offload.distributed.agreement.opening import Plan
from offload.distributed.agreement.peers import Json
from offload.distributed.rank_checkpoints import RankCheckpoints
from offload.distributed.rank_granting import RankGranting, require_rooms
from offload.distributed.rank_opening import open_first
from offload.distributed.rank_sealing import RankSealing, from_message, to_message
from offload.errors import RanksError
from offload.format.boxes import Cut
from offload.format.layout import Layout
from offload.format.names import MODEL_NAME
from offload.format.shares.model_shares import ModelShare
from offload.format.shares.part_table import owner_sizes
from offload.format.train_state import EncodedState, join_ranks
from offload.journal import Journal
from offload.model.buffer_watch import BufferWatch
from offload.options import Options
from offload.retention.pins import FoundPins, read_pins
from offload.retention.policy import Retention
from offload.store.expiry import Leaving
from offload.store.opening import StoredCheckpoint, find_stored
from offload.store.owner_store import OwnerStore
from offload.store.slots.slot import OwnerSlot
from offload.store.state_store import StateSlot
from offload.store.store import Store

ShareOf = Callable[[Layout], ModelShare]
"""Function that returns the boxes of the model that this rank writes, given a layout."""


class RankStore(RankCheckpoints):
    """The store of a training by several ranks, on one of them. The constructor is collective.

    Ranks of another host than the first directory's are told what they need of it.
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
        opened = open_first(
            agreement,
            backend,
            tuple(map(os.path.abspath, directories)),
            keep,
            options,
            fresh=fresh,
            settle=settle,
        )
        self.plan = opened.plan
        """How all ranks have opened the store."""
        self.is_near = opened.is_near
        """Whether this rank sees the first directory."""
        self.directory = opened.directory
        """The store's first directory."""
        self.directories = opened.directories
        """The first directory of the store, and the others that this rank was given."""
        self.state_directories = (opened.home,)
        """The directory that has the state of this rank."""
        super().__init__(opened)
        try:
            self._open_parts(options)
        except BaseException:
            opened.close()
            raise
        self.keeping = RankKeeping(self, opened.store)
        """Retention policy and pins, which are the writer's."""
        self.sealing = RankSealing(opened, share_of, self.published)
        """What makes checkpoints of the ranks' slots."""
        self._granting = RankGranting(opened, self, self.sealing, share_of, watch)

    def _open_parts(self, options: Options) -> None:
        """Open the parts of all ranks, and learn which checkpoints there are. Collective."""

        def make(_: object) -> Json:
            """Tell all ranks, on the writer, which store it is."""
            return self.offer() | {"place": self._opened.place}

        def ready(offer: Json) -> Json:
            """Open the parts of this rank's owner."""
            self._opened.open_part(offer, options)
            return self.learn(offer)

        agreed = self.agreement.agree("the constructor", make, ready)
        self.pass_over(agreed.notes)

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
            return self.offer()

        self.sealing.last_aborted = None  # a restore gives its slot up
        # A rank that announced an error before goes on with this call.
        agreed = self.agreement.agree(self.call, make, self.learn, heeds_errors=False)
        self.pass_over(agreed.notes)

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
        self.agreement.agree("checkpoint()", make, lambda _: None, ask=ask)
        self._train_states.pop((checkpoint.path, checkpoint.manifest.generation), None)

    def fits(self, checkpoint: StoredCheckpoint, cuts: Mapping[str, Cut] | None) -> bool:
        """Return whether this rank has stored its state of a checkpoint in its present cut."""
        owners = self.manifest_of(checkpoint).owners
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
        manifest = self.manifest_of(checkpoint)
        names = names_with_state(
            self.backend,
            checkpoint.path,
            manifest,
            self.further_of(manifest),
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
        """Return the state of a checkpoint in the present cut of this rank, for reading."""
        del shares  # each rank has one directory
        manifest = self.manifest_of(checkpoint)
        reach = None
        if not all(self.plan.near):
            model = manifest.layout.model
            names = (tensor.name for n, tensor in enumerate(model) if n in with_state)
            reach = Reach(self.is_near, frozenset(names))
        further = self.further_of(manifest)
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

    def model_of(self, checkpoint: StoredCheckpoint) -> File:
        """Return the file beside a checkpoint's manifest that has tensors of the model.

        It is open for this rank alone; the caller closes it.
        """
        name = self.manifest_of(checkpoint).layout.model_name
        return self.backend.open(f"{checkpoint.path}/{name}")

    def working_model(self, slot: OwnerSlot) -> File:
        """Open the model file of the writer's working slot for writing; the caller closes it.

        A seal writes it while later steps write other slots, so each seal has a file of its own.
        """
        folder = self.sealing.shared_of(slot).folder
        return self.backend.open(f"{self.directory}/{folder}/{MODEL_NAME}", writable=True)

    def close(self) -> None:
        """Close all files and release the locks. Idempotent."""
        self._opened.close()


class RankKeeping:
    """Retention policy and pins, as one rank uses them; see `offload.store.expiry.Keeping`."""

    def __init__(self, ranks: RankStore, store: Store | None) -> None:
        self._ranks = ranks
        self._keeping = None if store is None else store.keeping
        self._idle = Leaving()

    @property
    def current(self) -> list[StoredCheckpoint]:
        """Usable checkpoints that no fresh start has given up."""
        return [c for c in self._ranks.checkpoints if not c.superseded]

    @property
    def leaving(self) -> Leaving:
        """Checkpoints that are being copied to a tier, as the writer's store knows them."""
        return self._idle if self._keeping is None else self._keeping.leaving

    def pins(self) -> FoundPins:
        """Read the pins from the drive."""
        directory = self._ranks.directory
        if not self._ranks.is_near:
            raise RanksError(
                f"the pins are in {directory}, on another host: ask on a rank of that host"
            )
        return read_pins(self._ranks.backend, directory)

    def num_slots(self) -> int:
        """Return the number of slots that retention is sure to need; 0 if the writer knows it."""
        return 0 if self._keeping is None else self._keeping.num_slots()

    def warn(self, refused: Sequence[str]) -> None:
        """Warn, on the writer, about pins of checkpoints that do not exist."""
        if self._keeping is not None:
            self._keeping.warn(refused)

    def warn_unranked(self, step: int, metrics: Collection[str]) -> None:
        """Warn, on the writer, if a checkpoint lacks a metric that the policy ranks by."""
        if self._keeping is not None:
            self._keeping.warn_unranked(step, metrics)

    def pin(self, name: str, which: int | str | None = None) -> None:
        """Pin a checkpoint, durably. Collective."""
        keeping = self._keeping
        self._ranks.agreement.together(
            "pin()", lambda: keeping.pin(name, which) if keeping else None
        )

    def unpin(self, name: str) -> None:
        """Remove a pin, durably. Collective."""
        keeping = self._keeping
        self._ranks.agreement.together("unpin()", lambda: keeping.unpin(name) if keeping else None)

    def require_no_newer_pins(self, checkpoint: StoredCheckpoint) -> None:
        """Raise `PinError`, on the writer, if a checkpoint newer than the given one is pinned."""
        if self._keeping is not None:
            self._keeping.require_no_newer_pins(checkpoint)

    def require_replaceable(self, path: str) -> None:
        """Do nothing: the seal looks at the checkpoint that it would replace."""
