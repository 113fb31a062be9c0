"""The ranks of one training: what each of them steps and stores, and how they work together."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from gds import Backend
from offload.ambient import in_neutral
from offload.device.boundary import Marks
from offload.device.staging import Traffic
from offload.distributed.agreement.agreement import Agreement
from offload.distributed.agreement.messages import Json
from offload.distributed.agreement.opening import Plan
from offload.distributed.agreement.torch_channel import TorchChannel
from offload.distributed.gathering.gather import BounceBuffer, Gathering
from offload.distributed.gathering.gather_plan import (
    SLICE_BYTES,
    BoxKey,
    BoxPiece,
    GatherPlan,
    RankChunk,
    layout_chunks,
)
from offload.distributed.gathering.holder_groups import HolderGroups
from offload.distributed.gathering.sharing import share_bytes
from offload.distributed.gathering.step_agreement import StepAgreement, StepTerms
from offload.distributed.model_writers import require_near_holders, settled, writers
from offload.distributed.rank_store import RankStore, require_ranks
from offload.distributed.share_copy import NoCopy, ShareCopy, is_same_share, load_share
from offload.distributed.together import together
from offload.errors import RanksError, UnsupportedParameterError
from offload.format.boxes import Box, Cut
from offload.format.digests import DigestContext
from offload.format.layout import Layout, ParameterSpec
from offload.format.shares.dealing import OwnedBox, deal_rows, own_boxes
from offload.format.shares.model_shares import ModelShare, ModelShares, divide
from offload.model.model_copy import ModelCopy
from offload.model.new_values import NoValues, Step, Values
from offload.model.parameters import Stored
from offload.model.shards import Shard, Shards, cut_of, is_dtensor, local, own_shards
from offload.options import Options
from offload.retention.policy import Retention
from offload.store.opening import StoredCheckpoint
from offload.store.state_store import StateSlot, StateStore

T = TypeVar("T")

_numbers = Counter[str]()
"""Number of optimizers that this process has made, by group of ranks. The n-th optimizer of a group
is the same one on each of its ranks."""


class RankGroup:
    """The ranks that train one model into one store. The constructor is collective.

    Args:
        group: Process group of the ranks; None for the default group.
        named: Parameters of the model and of the optimizer, with their names in files; the same on
            all ranks, in the same order.
        multiple: Number of elements that each cut of a parameter is a multiple of.
        timeout_s: Seconds without a sign of progress after which a rank counts as lost.

    Raises:
        UnsupportedParameterError: A parameter is divided in a way that is not supported; names it.
        BoxesError: The ranks do not have the same model.
        RanksError: A rank was lost, or makes another call.
    """

    @in_neutral
    def __init__(
        self,
        group: dist.ProcessGroup | None,
        named: Sequence[tuple[str, torch.Tensor]],
        *,
        multiple: int,
        timeout_s: float,
    ) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        prefix = _prefix(dist.get_process_group_ranks(group or dist.group.WORLD))
        channel = TorchChannel(_get_default_store(), prefix, timeout_s=timeout_s)
        self._agreement = Agreement(channel, self.rank, self.size, timeout_s=timeout_s)
        self._traffic = Traffic()
        self._owned = self._own(named, multiple)
        self._holders: dict[BoxKey, tuple[int, ...]] = {
            (one.name, one.cut.box): one.holders for one in self._owned
        }
        self._known = {name for name, _ in self._holders}
        self._take(writer=0)
        everyone = tuple(range(self.size))
        sets = {holders for holders in self._holders.values() if len(holders) > 1}
        self._groups = HolderGroups({everyone, *sets}, group=group, timeout_s=timeout_s)
        self._steps = StepAgreement(self._groups.everyone)
        self._buffer = BounceBuffer(SLICE_BYTES)
        self._is_replicated = bool(sets)
        self._layout: Layout | None = None
        self._layout_text = ""
        self._layouts: list[Layout] = []
        """Layouts of all ranks, as they were exchanged when `_layout` was new."""
        self._plan: tuple[object, GatherPlan] | None = None
        """Plan of the last step, with what it was made of."""
        self._shares: tuple[bytes, ModelShares] | None = None
        self._store: RankStore | None = None

    def _take(self, *, writer: int) -> None:
        """Step the boxes that this rank owns.

        Args:
            writer: Rank that stores what no rank owns, such as buffers.
        """
        self._cuts = {one.name: one.cut for one in self._owned if one.owner == self.rank}
        """Box of each parameter that this rank steps and stores, by name."""
        keeps_others = self.rank == writer
        self._shard_of = own_shards(self._cuts, self._known, keeps_others=keeps_others)

    def _settle(self, plan: Plan) -> None:
        """Step the boxes of the owner that a plan gives to this rank."""
        owned = settled(self._owned, plan)
        require_near_holders(owned, plan)
        self._owned = owned
        self._take(writer=plan.writer)

    @property
    def shards(self) -> Shards | None:
        """Function that returns this rank's part of a tensor."""
        return self._shard

    def _shard(self, name: str, tensor: torch.Tensor) -> Shard | None:
        if name not in self._known and isinstance(tensor, torch.nn.Parameter):
            raise UnsupportedParameterError(
                f"parameter {name!r} has been added since the optimizer was constructed: with "
                "several ranks, construct it with a model that has all parameters; they may be "
                "frozen until they are trained"
            )
        return self._shard_of(name, tensor)

    def _own(
        self, named: Sequence[tuple[str, torch.Tensor]], multiple: int
    ) -> tuple[OwnedBox, ...]:
        """Decide with all ranks which rank steps and stores what."""
        tensors = dict(named)
        if not any(is_dtensor(tensor) for tensor in tensors.values()):
            return self._deal(tensors, multiple)
        view: list[tuple[str, Cut]] = []
        for name, tensor in tensors.items():
            if not is_dtensor(tensor):
                shape = tuple(tensor.shape)
                view.append((name, Cut(shape, Box.whole(shape))))
                continue
            shard = local(tensor, name)  # type: ignore[arg-type]
            if shard is not None:
                view.append((name, cut_of(shard)))
        views = self._exchange([[n, c.shape, c.box.offsets, c.box.sizes] for n, c in view])
        owned = own_boxes(
            [[(n, Cut(tuple(s), Box(tuple(o), tuple(z)))) for n, s, o, z in one] for one in views]
        )
        for one in owned:
            if one.cut.box.contiguous_range(one.cut.shape) is None:
                raise UnsupportedParameterError(
                    f"{one.name!r} of shape {list(one.cut.shape)} is cut in another dimension than "
                    f"the first ({one.cut.box.notation()} on rank {one.owner}), so that the ranks "
                    "cannot write one model file together: this is not supported yet. Shard "
                    "dimension 0"
                )
        return owned

    def _deal(self, tensors: Mapping[str, torch.Tensor], multiple: int) -> tuple[OwnedBox, ...]:
        """Deal parameters that every rank has. Trained and frozen ones are balanced apart."""
        everyone = tuple(range(self.size))
        owned: list[OwnedBox] = []
        for trained in (True, False):
            shapes = {n: t.shape for n, t in tensors.items() if t.requires_grad is trained}
            for rank, boxes in enumerate(deal_rows(shapes, self.size, multiple)):
                owned += [OwnedBox(name, cut, rank, everyone) for name, cut in boxes]
        # The ranks compute the same, if they have the same model: a difference is an error here.
        mine = [[name, list(t.shape), str(t.dtype), t.requires_grad] for name, t in tensors.items()]
        everywhere = self._exchange(mine)
        for rank, theirs in enumerate(everywhere):
            if theirs != everywhere[0]:
                pairs = itertools.zip_longest(everywhere[0], theirs)
                first, other = next(pair for pair in pairs if pair[0] != pair[1])
                raise UnsupportedParameterError(
                    f"rank 0 and rank {rank} have different parameters: {first} and {other} "
                    "(name, shape, dtype, requires_grad): build the same model on every rank"
                )
        return tuple(owned)

    def _exchange(self, mine: Json) -> list[Any]:
        """Return what each rank says, by rank. Collective."""

        def make(asked: Mapping[int, Json]) -> Json:
            return [asked[rank] for rank in sorted(asked)]

        agreed = self._agreement.agree("the constructor", make, lambda _: None, ask=mine, asks=True)
        return list(agreed.offer)

    def open_store(
        self,
        drives: Sequence[tuple[Backend, str]],
        keep: Retention,
        options: Options,
        *,
        fresh: bool,
    ) -> StateStore:
        """Open the store with all ranks."""
        directories = [directory for _, directory in drives]
        (backend, _), *_ = drives
        self._store = RankStore(
            self._agreement,
            backend,
            directories,
            self.share_of,
            keep,
            options,
            fresh=fresh,
            settle=self._settle,
        )
        return self._store

    def together(self, what: str, action: Callable[[], T]) -> T:
        """Do something on every rank, and return when it has succeeded on all of them."""
        return together(self._agreement, what, action)

    def all(self, what: str, value: bool) -> bool:
        """Return whether a value is true on all ranks."""

        def make(asked: Mapping[int, Json]) -> Json:
            return all(asked.values())

        return bool(self._agreement.agree(what, make, lambda _: None, ask=value, asks=True).offer)

    def require_same(self, what: str, value: str) -> None:
        """Check that a value is the same on all ranks."""

        def make(asked: Mapping[int, Json]) -> Json:
            for rank, theirs in sorted(asked.items()):
                if theirs != asked[0]:
                    raise RanksError(
                        f"rank 0 asks for {asked[0]} and rank {rank} for {theirs}: make the same "
                        "call on every rank. Nothing was changed"
                    )
            return None

        self._agreement.agree(what, make, lambda _: None, ask=value, asks=True)

    def failed(self, error: BaseException) -> None:
        """Tell the other ranks that a step has failed here."""
        self._agreement.broadcast_error(error)

    def close(self) -> None:
        """Leave the ranks."""
        self._agreement.close()

    def share_of(self, layout: Layout) -> ModelShare:
        """Return the boxes of the model that this rank writes."""
        return self._divided(layout).share(self.rank)

    def _divided(self, layout: Layout) -> ModelShares:
        header = layout.model_header
        if self._shares is None or self._shares[0] != header.encoded:
            plan = self._opened().plan
            boxes = writers(self._owned, plan, header)
            self._shares = header.encoded, divide(header, boxes, writer=plan.writer)
        return self._shares[1]

    def model_copy(
        self, slot: StateSlot, stored: Sequence[Stored], marks: Marks
    ) -> ModelCopy | None:
        """Return the copy of this rank's share of the model into a slot."""
        store = self._opened()
        share = self.share_of(slot.layout)
        if not share.entries:
            store.sealing.copy = NoCopy()
            return store.sealing.copy
        file, close = store.working_model(slot)
        copy = ShareCopy(
            share,
            self._tensors_of(share, stored),
            file,
            store.backend,
            slot.context,
            marks,
            self._traffic,
            self._agreement.progress,
            close,
        )
        store.sealing.copy = copy
        return copy

    def has_same_model(self, checkpoint: StoredCheckpoint, stored: Sequence[Stored]) -> bool | None:
        """Return whether this rank's share of the model equals a checkpoint's, bit for bit."""
        manifest = checkpoint.manifest
        share = self.share_of(manifest.layout)
        return is_same_share(
            share,
            manifest.model_boxes,
            self._tensors_of(share, stored),
            self._opened().backend,
            DigestContext(manifest.store_id, manifest.generation),
            self._traffic,
        )

    def load_model(self, checkpoint: StoredCheckpoint, stored: Sequence[Stored]) -> int | None:
        """Load this rank's share of a checkpoint's model."""
        store, manifest = self._opened(), checkpoint.manifest
        require_ranks(manifest, checkpoint.path, self.size)
        share = self.share_of(manifest.layout)
        if not share.entries and not store.is_near:
            return 0
        with store.model_of(checkpoint) as file:
            return load_share(
                share,
                manifest.model_boxes,
                self._tensors_of(share, stored),
                file,
                store.backend,
                DigestContext(manifest.store_id, manifest.generation),
                self._traffic,
            )

    def _tensors_of(self, share: ModelShare, stored: Sequence[Stored]) -> list[torch.Tensor]:
        """Return the live memory of each box of a share."""
        live = {item.spec.name: item for item in stored}
        found = []
        for entry in share.entries:
            item, cut = live[entry.name], self._cuts.get(entry.name)
            is_own = cut is None if entry.name not in self._known else cut == entry.cut
            found.append(item.tensor if is_own else part_of(item.parameter, entry.box))
        return found

    def share_model(self, stored: Sequence[Stored]) -> None:
        """Bring what each rank has loaded to all ranks that hold it."""
        everyone = tuple(range(self.size))
        live = {item.spec.name: item for item in stored}
        shares = self._shares
        if shares is None:
            raise RuntimeError("no model has been loaded")
        holders: dict[BoxKey, tuple[int, ...]] = {}
        chunks: list[list[RankChunk]] = []
        for boxes in shares[1].boxes:
            pieces = []
            for one in boxes:
                key = (one.name, one.box)
                holders[key] = self._holders.get(key, everyone)
                dtype = shares[1].header.entries[one.name].dtype
                pieces.append(BoxPiece(one.name, one.box, dtype, 0, one.box.num_elements))
            chunks.append([RankChunk(0, tuple(pieces))] if pieces else [])
        plan = GatherPlan(chunks, holders)

        def memory(name: str, box: Box) -> torch.Tensor:
            return part_of(live[name].parameter, box)

        gathering = Gathering(plan, self._groups, memory, self._buffer)
        gathering.updated(0)
        gathering.finish()

    def begin_step(self, terms: Step) -> Values:
        """Agree with all ranks on a step, and return what brings its new values to all of them."""
        if not self._is_replicated:
            return NoValues()
        if terms.layout is not self._layout:
            # A restore makes a new object on some ranks, which is equal on all or on none.
            text = _text_of(terms.layout)
            if text != self._layout_text:
                everywhere = share_bytes(text.encode(), self._groups.everyone)
                self._layouts = [_layout_of(data) for data in everywhere]
            self._layout, self._layout_text = terms.layout, text
        orders = self._steps.agree(StepTerms(terms.number, list(terms.stepped), list(terms.chunks)))
        made_of = (tuple(terms.stepped), tuple(orders), terms.layout)
        if self._plan is None or self._plan[0] != made_of:
            stepped = set(terms.stepped)
            chunks = [
                layout_chunks(layout, order=order, stepped=stepped)
                for layout, order in zip(self._layouts, orders, strict=True)
            ]
            late = {
                key
                for key in self._holders
                if key[0] in stepped
                and self.rank in self._holders[key]
                and not part_of(terms.memory(key[0]), key[1]).is_contiguous()
            }
            self._plan = made_of, GatherPlan(chunks, self._holders, late=late)
        return Gathering(
            self._plan[1],
            self._groups,
            lambda name, box: part_of(terms.memory(name), box),
            self._buffer,
            before_write=lambda piece: terms.before_write(piece.name),
        )

    def _opened(self) -> RankStore:
        if self._store is None:
            raise RuntimeError("the store has not been opened")
        return self._store


def _prefix(ranks: Sequence[int]) -> str:
    """Return a prefix for the keys of a new optimizer, which no other one of any group has.

    All groups use the same key-value store, so the prefix names the group by its ranks.
    """
    group = hashlib.sha256(json.dumps([*ranks]).encode()).hexdigest()[:16]
    number = _numbers[group]
    _numbers[group] += 1
    return f"offload/{group}/{number}/"


def part_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """Return this rank's live memory of a box, with the version counter of its tensor."""
    if is_dtensor(tensor):
        memory: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
        return memory.detach()
    return tensor.detach()[box.slices]


def _text_of(layout: Layout) -> str:
    """Return what other ranks need to know of a layout, as JSON."""
    mine = [
        [p.name, p.dtype, p.shape, p.cut and [p.cut.shape, p.cut.box.offsets]]
        for p in layout.parameters
    ]
    return json.dumps([layout.chunk_elements, layout.state_dtype, layout.counts_from, mine])


def _layout_of(data: bytes) -> Layout:
    chunk_elements, state_dtype, counts_from, parameters = json.loads(data)
    specs = []
    for name, dtype, shape, cut in parameters:
        box = cut and Cut(tuple(cut[0]), Box(tuple(cut[1]), tuple(shape)))
        specs.append(ParameterSpec(name, dtype, tuple(shape), 0, ("exp_avg",), box or None))
    return Layout(tuple(specs), (), chunk_elements, state_dtype, (1,), counts_from)
