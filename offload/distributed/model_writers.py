"""Assignment of the boxes of ``model.safetensors`` to the ranks that write them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from offload.distributed.agreement.opening import Plan
from offload.errors import RanksError
from offload.format.header import Header
from offload.format.shares.dealing import OwnedBox
from offload.format.shares.model_shares import TensorBox


def settled(owned: Sequence[OwnedBox], plan: Plan) -> tuple[OwnedBox, ...]:
    """Return boxes with the ranks that step them, once it is known which rank serves which owner.

    A share of the state stays with its owner, whatever the number of the rank that serves it is.

    Args:
        owned: Boxes as they were dealt: the owner of a box is the number of its share.
        plan: How all ranks open the store.

    Raises:
        RanksError: A rank cannot step the share of its owner, because it does not hold it; or no
            rank that sees the first directory holds a box.
    """
    rank_of = [plan.homes.index(owner) for owner in sorted(plan.homes)]
    found = []
    for one in owned:
        rank = rank_of[one.owner]
        if rank not in one.holders:
            raise RanksError(
                f"rank {rank} on {plan.hosts[rank]} sees the state of {one.name!r} "
                f"{one.cut.box.notation()}, and rank {one.owner} on {plan.hosts[one.owner]} holds "
                "that shard of the parameter: give the ranks of each host the numbers that they "
                "had before (torchrun --node-rank), or exchange the drives of the hosts"
            )
        found.append(replace(one, owner=rank))
    if not all(plan.near):
        _require_near_holders(found, plan)
    return tuple(found)


def writers(owned: Sequence[OwnedBox], plan: Plan, header: Header) -> list[list[TensorBox]]:
    """Return the boxes of the model that each rank writes, by rank.

    A box is written by its owner. If that rank does not see the first directory, one of those that
    do and that hold the box as well writes it: the one with the fewest elements to write so far.

    Args:
        owned: Boxes with the ranks that step them.
        plan: How all ranks have opened the store.
        header: Header of the model file; other boxes are left out.
    """
    boxes: list[list[TensorBox]] = [[] for _ in plan.homes]
    load = [0] * len(boxes)
    written = [one for one in owned if one.name in header.entries]
    for one in sorted(written, key=lambda one: not plan.near[one.owner]):
        candidates = [one.owner] if plan.near[one.owner] else _near_holders(one, plan)
        rank = min(candidates, key=lambda number: (load[number], number))
        boxes[rank].append(TensorBox(one.name, one.cut.box))
        load[rank] += one.cut.box.num_elements
    return boxes


def _require_near_holders(owned: Sequence[OwnedBox], plan: Plan) -> None:
    """Check that ranks which see the first directory can write the whole model.

    Raises:
        RanksError: They cannot; names a box.
    """
    for one in owned:
        if one.cut.box.contiguous_range(one.cut.shape) is None:
            raise RanksError(
                f"{one.name!r} {one.cut.box.notation()} of shape {list(one.cut.shape)} is cut in "
                "another dimension than the first, and the ranks are on several hosts: this is not "
                "supported yet"
            )
        if one.cut.box.num_elements and not _near_holders(one, plan):
            raise RanksError(
                f"{one.name!r} {one.cut.box.notation()} is held by rank {one.owner} on "
                f"{plan.hosts[one.owner]} only, which does not see the first directory of the "
                f"store, {plan.directories[plan.writer]}, on {plan.hosts[plan.writer]}: shards "
                "over several hosts are not supported yet. Shard within each host and replicate "
                "over the hosts (a mesh of two dimensions for fully_shard), or use "
                "DistributedDataParallel"
            )


def _near_holders(one: OwnedBox, plan: Plan) -> list[int]:
    """Return the ranks that hold a box and see the first directory."""
    return [rank for rank in one.holders if plan.near[rank]]
