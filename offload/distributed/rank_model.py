"""The model in checkpoints, as one rank copies, compares and loads its share of it.

If ranks on the first directory's host hold the whole model in ranges of one ``model.safetensors``,
they write it together. Otherwise the model is *sharded*: each rank writes the boxes that it owns
into a shard file in its own part of the checkpoint, and reads them from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch

from gds import File
from offload.device.boundary import Marks
from offload.device.staging import Traffic
from offload.distributed.agreement.opening import Plan
from offload.distributed.gathering.gather import BounceBuffer, part_of, share_boxes
from offload.distributed.gathering.holder_groups import HolderGroups
from offload.distributed.gathering.step_agreement import Replicas
from offload.distributed.ownership import Ownership, needs_shards, writers
from offload.distributed.rank_store import RankStore
from offload.distributed.share_copy import (
    Memory,
    ShareCopy,
    is_own_share,
    is_same_share,
    load_share,
)
from offload.errors import RanksError
from offload.format.boxes import Box, Cut
from offload.format.digests import Content, DigestContext
from offload.format.header import Header
from offload.format.layout import Layout
from offload.format.model_shard import ModelShard
from offload.format.shares.dealing import OwnedBox
from offload.format.shares.model_shares import (
    ModelShare,
    ModelShares,
    divide,
    model_shard,
    shard_share,
)
from offload.model.model_reading import LiveBox, read_model, require_seen_model
from offload.model.stored import Stored
from offload.store.opening import StoredCheckpoint
from offload.store.slots.slot import Slot
from offload.store.state_store import StateSlot


class RankModel:
    """This rank's share of the model in checkpoints."""

    def __init__(
        self,
        rank: int,
        ownership: Ownership,
        traffic: Traffic,
        progress: Callable[[], None],
        replicas: Replicas,
    ) -> None:
        self._replicas = replicas
        self._rank = rank
        self._ownership = ownership
        self._traffic = traffic
        self._progress = progress
        self._divided: dict[bool, tuple[bytes, ModelShares]] = {}
        """For a sharded model and for a common file: header of the whole model, and shares."""
        self._own: tuple[ModelShares | ModelShard, ModelShare] | None = None
        """What this rank writes to a common file or to its shard file, and what that came from."""
        self._laid_out: tuple[Layout, Layout] | None = None
        """Layout that `lay_out` was given last, and what it has returned."""
        self._loaded: ModelShares | None = None
        """What all ranks have loaded last."""

    def forget(self) -> None:
        """Divide the model anew when it is next needed, because parameters have changed."""
        self._divided.clear()
        self._own = self._laid_out = None

    def lay_out(self, layout: Layout) -> Layout:
        """Return a layout with the shard file that a new slot of this rank has, if it has one."""
        if self._laid_out is None or self._laid_out[0] is not layout:
            shard = self._shard(layout.model_header) if self._is_sharded else None
            found = layout if shard == layout.shard else replace(layout, shard=shard)
            self._laid_out = layout, found
        return self._laid_out[1]

    def share_of(self, layout: Layout) -> ModelShare:
        """Return the boxes of the model that this rank writes."""
        if layout.shard is None:
            shares = self._shares(layout.model_header, is_sharded=False)
            if self._own is None or self._own[0] != shares:
                self._own = shares, shares.share(self._rank)
        elif self._own is None or self._own[0] != layout.shard:
            self._own = layout.shard, shard_share(layout)
        return self._own[1]

    def copy(
        self, store: RankStore, slot: StateSlot, stored: Sequence[Stored], marks: Marks
    ) -> ShareCopy:
        """Return the copy of this rank's share of the model into a slot."""
        file: File | None = None
        content, closing = Content(), ExitStack()
        if slot.layout.shard is not None:
            file, content = slot.model, slot.model_leaves.content
        elif store.is_near:  # the ranks that see the file write all of it
            content = store.sealing.shared_of(slot).content
            if isinstance(slot, Slot):
                file = slot.model
            else:
                file = closing.enter_context(store.working_model(slot))
        live = {
            item.spec.name: item.parameter if item.memory is None else item.memory
            for item in stored
        }
        share, known = self.share_of(slot.layout), store.sealing.known

        def forget() -> None:
            """Record that values may differ between ranks, and what the file has is unknown."""
            self._replicas.forget()
            known.forget(content)

        store.sealing.copy = copy = ShareCopy(
            share,
            self._memory_of(stored),
            file,
            store.backend,
            slot.context,
            marks,
            self._traffic,
            self._progress,
            partial(self._replicas.digests, None, live.get, marks),
            known=known.of(content, share),
            changing={s.spec.name for s in stored if s.parameter.requires_grad},
            forget=forget,
            close=closing.close,
        )
        return copy

    def is_same(
        self, store: RankStore, checkpoint: StoredCheckpoint, stored: Sequence[Stored]
    ) -> bool:
        """Return whether this rank's share of the model equals a checkpoint's, bit for bit."""
        manifest = checkpoint.manifest
        layout = manifest.layout
        if self.lay_out(layout).shard != layout.shard:
            return False  # a new checkpoint would have other files
        if layout.shard is None and not store.is_near:
            return True  # the ranks that see the file compare all of it
        return is_same_share(
            self.share_of(layout),
            manifest.model_boxes,
            self._memory_of(stored),
            store.backend,
            DigestContext(manifest.store_id, manifest.generation),
            self._traffic,
        )

    def check(self, store: RankStore, checkpoint: StoredCheckpoint) -> None:
        """Check that this rank sees its share of a checkpoint's model. No collective."""
        layout = checkpoint.manifest.layout
        is_sharded = layout.shard is not None
        if self._is_sharded and not is_sharded:
            self._require_all_near(store, checkpoint)
        if not is_sharded or all(store.plan.near) or self._is_own(layout):
            return
        shares = self._shares(layout.model_header, is_sharded=True)
        require_seen_model(
            store.backend,
            checkpoint.path,
            store.manifest_of(checkpoint),
            shares.boxes[self._rank],
            store.directories[1:],
            sees_first=store.is_near,
        )

    def _is_own(self, layout: Layout) -> bool:
        """Return whether a layout has a shard file with the boxes that this rank writes now."""
        return layout.shard is not None and layout.shard == self._shard(layout.model_header)

    def load(self, store: RankStore, checkpoint: StoredCheckpoint, stored: Sequence[Stored]) -> int:
        """Load this rank's share of a checkpoint's model; return the number of bytes read.

        `share` must follow, on all ranks, if all have loaded their share.
        """
        manifest = checkpoint.manifest
        layout, memory = manifest.layout, self._memory_of(stored)
        is_sharded = layout.shard is not None
        shares = self._loaded = self._shares(layout.model_header, is_sharded=is_sharded)
        if self._is_own(layout):
            file = store.slot_of(checkpoint).model
            return load_share(
                shard_share(layout), manifest, memory, file, store.backend, self._traffic
            )
        if not store.is_near and not is_sharded:
            return 0  # `share` brings it
        if not is_sharded and not self._is_sharded:
            share = self.share_of(layout)
            if is_own_share(share, manifest.model_boxes):
                with store.model_of(checkpoint) as file:
                    return load_share(share, manifest, memory, file, store.backend, self._traffic)
        boxes = [(one.name, one.box) for one in shares.boxes[self._rank]]
        return read_model(
            store.backend,
            checkpoint.path,
            store.manifest_of(checkpoint),
            [LiveBox(name, box, memory(name, box)) for name, box in boxes],
            self._traffic,
            parts=store.directories[1:],
            sees_first=store.is_near,
            partly=is_sharded and not all(store.plan.near),
        )

    def share(self, stored: Sequence[Stored], groups: HolderGroups, buffer: BounceBuffer) -> None:
        """Bring what each rank has loaded to all ranks that hold it. Collective."""
        shares = self._loaded
        if shares is None:
            raise RuntimeError("no model has been loaded")
        entries, everyone = shares.header.entries, tuple(range(groups.num_ranks))
        holders = self._ownership.holders
        boxes = [
            OwnedBox(
                one.name,
                Cut(entries[one.name].shape, one.box),
                rank,
                holders.get((one.name, one.box), everyone),
            )
            for rank, own in enumerate(shares.boxes)
            for one in own
        ]
        live = {item.spec.name: item.parameter for item in stored}
        tensors = [(name, entry.dtype, live[name]) for name, entry in entries.items()]
        share_boxes(boxes, tensors, groups, buffer)

    @property
    def _is_sharded(self) -> bool:
        """Whether new checkpoints have the model in shard files."""
        return needs_shards(self._ownership.boxes, self._plan)

    @property
    def _plan(self) -> Plan:
        plan = self._ownership.plan
        if plan is None:
            raise RuntimeError("the store has not been opened")
        return plan

    def _shares(self, header: Header, *, is_sharded: bool) -> ModelShares:
        """Return what each rank writes of the model."""
        known = self._divided.get(is_sharded)
        if known is None or known[0] != header.encoded:
            boxes = writers(self._ownership.boxes, self._plan, header, is_sharded=is_sharded)
            known = header.encoded, divide(header, boxes, writer=self._plan.writer)
            self._divided[is_sharded] = known
        return known[1]

    def _shard(self, header: Header) -> ModelShard:
        """Return what this rank writes to a shard file."""
        shares = self._shares(header, is_sharded=True)
        return model_shard(shares, self._rank, self._plan.homes[self._rank])

    def _require_all_near(self, store: RankStore, checkpoint: StoredCheckpoint) -> None:
        """Check that all ranks see the first directory, for a model that is in one file there."""
        if all(store.plan.near):
            return
        raise RanksError(
            f"{checkpoint.path} has its model in one file on one host, and these ranks are on "
            "several hosts, which do not see all of it. Give the ranks the hosts that they had "
            "when it was made, or export it (offload export), and load that"
        )

    def _memory_of(self, stored: Sequence[Stored]) -> Memory:
        """Return the function that returns live memory of boxes, as a seal has captured it."""
        live = {item.spec.name: item for item in stored}
        cuts = self._ownership.cuts

        def memory(name: str, box: Box) -> torch.Tensor:
            item, cut = live[name], cuts.get(name)
            is_own = item.is_here if cut is None else cut.box == box
            whole = item.parameter if item.memory is None else item.memory
            return item.tensor if is_own else part_of(whole, box)

        return memory
