"""Ownership: which rank steps and stores which box of which parameter. All ranks know the same.

Every rank knows the mesh and the placements of a DTensor, and so computes the boxes of all ranks.
Whether they are the true ones is seen by each rank for its own box only, so the ranks compare.
"""

from __future__ import annotations

import hashlib
import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from offload.distributed.agreement.opening import Plan
from offload.distributed.agreement.peers import Json
from offload.distributed.gathering.gather_plan import BoxKey
from offload.errors import RanksError, UnsupportedParameterError
from offload.format.boxes import Box, Cut
from offload.format.header import Header
from offload.format.shares.dealing import OwnedBox, deal_rows, own_boxes
from offload.format.shares.model_shares import TensorBox
from offload.model.shards import Shard, cut_of, is_dtensor, local, own_shards

Named: TypeAlias = Sequence[tuple[str, torch.Tensor]]
"""Parameters with their names in files; the same on all ranks, in the same order."""

SPAN_ELEMENTS = 8 << 20
"""Elements of a span of consecutive parameters for each rank that holds them all: as many as a
chunk has by default. All ranks step one span at the same time. So the first layers have their new
values early, and a forward beside the step can begin. The number does not follow the size of
chunks, because the cut of a store would then change with it."""


class Ownership:
    """Boxes of all parameters, with their owners and holders."""

    def __init__(
        self,
        rank: int,
        size: int,
        multiple: int,
        exchange: Callable[[Json], list[Any]],
        ranks: Sequence[int] | None = None,
    ) -> None:
        self._rank = rank
        self._ranks = range(size) if ranks is None else ranks
        self._size = size
        self._multiple = multiple
        self._exchange = exchange
        self.boxes: tuple[OwnedBox, ...] = ()
        """Boxes of all ranks."""
        self.holders: dict[BoxKey, tuple[int, ...]] = {}
        """Ranks that hold each box, in ascending order."""
        self.cuts: dict[str, Cut] = {}
        """Box of each parameter that this rank steps and stores, by name."""
        self._known: dict[str, weakref.ref[torch.Tensor]] = {}
        self.plan: Plan | None = None
        """How all ranks have opened the store; None before."""
        self._shard_of = own_shards(self.cuts, self._known, keeps_others=rank == 0)

    @property
    def holder_sets(self) -> set[tuple[int, ...]]:
        """Sets of several ranks that hold the same box."""
        return {holders for holders in self.holders.values() if len(holders) > 1}

    def find(self, name: str) -> torch.Tensor | None:
        """Return the parameter with a name; None if there is none."""
        known = self._known.get(name)
        return None if known is None else known()

    def settle(self, plan: Plan) -> None:
        """Take the share of the owner that a plan gives to this rank."""
        boxes = settled(self.boxes, plan)
        self.plan, self.boxes = plan, boxes
        self.cuts.clear()
        self.cuts |= {one.name: one.cut for one in boxes if one.owner == self._rank}
        is_writer = self._rank == plan.writer
        self._shard_of = own_shards(self.cuts, self._known, keeps_others=is_writer)

    def know(self, named: Named, *, replaces: bool) -> bool:
        """Decide who steps parameters that are not known yet. Collective if there are any.

        If other objects may have replaced known parameters, as ``fully_shard`` does, all are dealt
        anew. Returns whether anything has changed.
        """
        dealt = [(name, tensor) for name, tensor in named if name not in self._known]
        if replaces and self._known:
            if not dealt and all(self._known[name]() is tensor for name, tensor in named):
                return False
            dealt = [*named]
        if not dealt and self._known:
            return False
        boxes = self._own(dict(dealt))
        if self.plan is not None:
            boxes = settled(boxes, self.plan)
        if replaces:
            for found in (self.holders, self.cuts, self._known):
                found.clear()
            self.boxes = ()
        self.boxes += boxes
        self.holders |= {(one.name, one.cut.box): one.holders for one in boxes}
        self.cuts |= {one.name: one.cut for one in boxes if one.owner == self._rank}
        self._known |= {name: weakref.ref(tensor) for name, tensor in dealt}
        return True

    def shard(self, name: str, tensor: torch.Tensor) -> Shard | None:
        """Return this rank's part of a tensor; see `offload.model.shards.Shards`."""
        if name not in self._known and isinstance(tensor, torch.nn.Parameter):
            raise UnsupportedParameterError(
                f"parameter {name!r} has been added since the optimizer was constructed, so no "
                "rank stores it. Pass it to add_param_group() on every rank, or construct the "
                "optimizer with a model that has it; it may be frozen until it is trained"
            )
        return self._shard_of(name, tensor)

    def _own(self, tensors: Mapping[str, torch.Tensor]) -> tuple[OwnedBox, ...]:
        """Return the boxes of all ranks, which have the same tensors. Collective."""
        # What each rank can compute is not sent: a digest of it tells that all have the same. The
        # kinds of the tensors are part of it, because ranks with other kinds send other things.
        mine = [_described(name, tensor) for name, tensor in tensors.items()]
        are_plain = not any(is_dtensor(tensor) for tensor in tensors.values())
        view = [] if are_plain else _view(tensors)
        derived = None if are_plain else derived_views(tensors, self._ranks)
        is_derived = derived is not None and derived[self._rank] == view
        digests = [_digest(mine), _digest(derived) if is_derived else ""]
        said = self._exchange(digests)
        if any(one[0] != digests[0] for one in said):
            _require_same_tensors(self._exchange(mine))
        if are_plain:
            return tuple(self._deal(tensors))
        if derived is not None and digests[1] and all(one == digests for one in said):
            return own_boxes(derived)
        views = self._exchange([[n, c.shape, c.box.offsets, c.box.sizes] for n, c in view])
        return own_boxes(
            [[(n, Cut(tuple(s), Box(tuple(o), tuple(z)))) for n, s, o, z in one] for one in views]
        )

    def _deal(self, tensors: Mapping[str, torch.Tensor]) -> Iterable[OwnedBox]:
        """Deal parameters that every rank has. Trained and frozen ones are balanced apart."""
        everyone = tuple(range(self._size))
        for trained in (True, False):
            shapes = {n: t.shape for n, t in tensors.items() if t.requires_grad is trained}
            dealt = deal_rows(
                shapes, self._size, self._multiple, span_elements=SPAN_ELEMENTS * self._size
            )
            for rank, boxes in enumerate(dealt):
                for name, cut in boxes:
                    yield OwnedBox(name, cut, rank, everyone)


def _view(tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, Cut]]:
    """Return the box that this rank holds of each tensor that it holds something of."""
    view: list[tuple[str, Cut]] = []
    for name, tensor in tensors.items():
        if not is_dtensor(tensor):
            shape = tuple(tensor.shape)
            view.append((name, Cut(shape, Box.whole(shape))))
            continue
        shard = local(tensor, name)  # type: ignore[arg-type]
        if shard is not None:
            view.append((name, cut_of(shard)))
    return view


def _described(name: str, tensor: torch.Tensor) -> list[Json]:
    """Return what all ranks must have alike of a tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        shape, dtype, trained = list(tensor.shape), str(tensor.dtype), tensor.requires_grad
    return [name, shape, dtype, trained, "DTensor" if is_dtensor(tensor) else "plain"]


def _require_same_tensors(everywhere: Sequence[Sequence[Json]]) -> None:
    """Check that all ranks have described the same tensors."""
    for rank, theirs in enumerate(everywhere):
        if theirs != everywhere[0]:
            pairs = itertools.zip_longest(everywhere[0], theirs)
            first, other = next(pair for pair in pairs if pair[0] != pair[1])
            raise UnsupportedParameterError(
                f"rank 0 and rank {rank} have different parameters: {first or 'none'} and "
                f"{other or 'none'} (name, shape, dtype, requires_grad, DTensor or plain tensor). "
                "Build the same model on every rank, and shard it on all of them or on none"
            )


def _digest(value: object) -> str:
    """Return a text that stands for a value made of lists, numbers, texts and boxes."""
    return hashlib.blake2b(repr(value).encode(), digest_size=16).hexdigest()


View: TypeAlias = list[tuple[str, Cut]]
"""Name and box of each tensor of which a rank holds something, in the order of the model."""


def derived_views(tensors: Mapping[str, torch.Tensor], ranks: Sequence[int]) -> list[View] | None:
    """Return what each rank holds, by rank; None if torch has no rule for one of the tensors."""
    views: list[View] = [[] for _ in ranks]
    known: dict[object, list[Cut | None] | None] = {}
    for name, tensor in tensors.items():
        with torch._C.DisableTorchFunctionSubclass():
            shape = tuple(tensor.shape)
        cuts: list[Cut | None] | None = [Cut(shape, Box.whole(shape))] * len(ranks)
        if is_dtensor(tensor):
            mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
            pattern = shape, placements, id(mesh)  # the layers of a model are divided alike
            if pattern not in known:
                known[pattern] = _cuts(shape, mesh.mesh, placements, ranks)
            cuts = known[pattern]
        if cuts is None:
            return None
        for view, cut in zip(views, cuts, strict=True):
            if cut is not None:
                view.append((name, cut))
    return views


def _cuts(
    shape: tuple[int, ...],
    mesh: torch.Tensor,
    placements: Sequence[object],
    ranks: Sequence[int],
) -> list[Cut | None] | None:
    """Return the box of each rank, None for one that is not in the mesh; None without a rule.

    Torch cuts a dimension as `torch.chunk` does, mesh dimension by mesh dimension.
    """
    from torch.distributed.tensor import Replicate, Shard

    if any(type(placement) not in (Replicate, Shard) for placement in placements):
        return None  # strided shards, for example
    places = {int(mesh[tuple(at)]): at for at in torch.ones_like(mesh).nonzero().tolist()}
    found: list[Cut | None] = []
    for rank in ranks:
        at = places.get(rank)
        if at is None:
            found.append(None)
            continue
        offsets, sizes = [0] * len(shape), [*shape]
        for number, placement in enumerate(placements):
            if isinstance(placement, Shard):
                dim = placement.dim
                step = -(-sizes[dim] // mesh.shape[number])
                first = min(at[number] * step, sizes[dim])
                sizes[dim] = min(step, sizes[dim] - first)
                # Torch says of an empty part that it begins where the tensor ends.
                offsets[dim] = offsets[dim] + first if sizes[dim] else shape[dim]
        found.append(Cut(shape, Box(tuple(offsets), tuple(sizes))))
    return found


def settled(owned: Sequence[OwnedBox], plan: Plan) -> tuple[OwnedBox, ...]:
    """Return boxes with the ranks that step them, once it is known which rank serves which owner.

    A share of the state stays with its owner, whatever the number of the rank that serves it is.
    """
    rank_of = [plan.homes.index(owner) for owner in sorted(plan.homes)]
    found = []
    for one in owned:
        rank = rank_of[one.owner]
        if rank not in one.holders:
            raise RanksError(
                f"rank {rank} on {plan.hosts[rank]} sees the state of {one.name!r} "
                f"{one.cut.box.notation()}, and rank {one.owner} on {plan.hosts[one.owner]} holds "
                "that shard of the parameter. Give the ranks of each host the numbers that they "
                "had before (torchrun --node-rank), or exchange the drives of the hosts"
            )
        found.append(replace(one, owner=rank))
    return tuple(found)


def writers(
    owned: Sequence[OwnedBox], plan: Plan, header: Header, *, is_sharded: bool = False
) -> list[list[TensorBox]]:
    """Return the boxes of the model that each rank writes, by rank.

    A box is written by its owner. If there is one common file and that rank does not see the first
    directory, one of those that do and that hold the box as well writes it: the one with the fewest
    elements to write so far.
    """
    boxes: list[list[TensorBox]] = [[] for _ in plan.homes]
    load = [0] * len(boxes)
    written = [one for one in owned if one.name in header.entries]
    for one in sorted(written, key=lambda one: not plan.near[one.owner]):
        is_own = is_sharded or plan.near[one.owner]
        candidates = [one.owner] if is_own else _near_holders(one, plan)
        rank = min(candidates, key=lambda number: (load[number], number))
        boxes[rank].append(TensorBox(one.name, one.cut.box))
        load[rank] += one.cut.box.num_elements
    return boxes


def needs_shards(owned: Sequence[OwnedBox], plan: Plan) -> bool:
    """Return whether the model has to be in shard files of the owners.

    It has to be if the ranks that see the first directory do not hold all of the model, or if a box
    is not contiguous in its tensor: in one file, its bytes would lie between those of other ranks.
    """
    return any(
        one.cut.box.num_elements
        and (one.cut.box.contiguous_range(one.cut.shape) is None or not _near_holders(one, plan))
        for one in owned
    )


def _near_holders(one: OwnedBox, plan: Plan) -> list[int]:
    """Return the ranks that hold a box and see the first directory."""
    return [rank for rank in one.holders if plan.near[rank]]
