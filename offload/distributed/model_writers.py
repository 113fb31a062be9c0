"""Assignment of the boxes of the model to the ranks that write them."""

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
    return tuple(found)


def writers(
    owned: Sequence[OwnedBox], plan: Plan, header: Header, *, is_sharded: bool = False
) -> list[list[TensorBox]]:
    """Return the boxes of the model that each rank writes, by rank.

    A box is written by its owner. If there is one common file and that rank does not see the first
    directory, one of those that do and that hold the box as well writes it: the one with the fewest
    elements to write so far.

    Args:
        owned: Boxes with the ranks that step them.
        plan: How all ranks have opened the store.
        header: Header of the whole model; other boxes are left out.
        is_sharded: Whether each owner has a shard file of its own.
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

    It has to be if the ranks that see the first directory do not hold all of the model; and if
    ranks are on several hosts and a box is not contiguous in its tensor, because such a box is
    written through one page cache that all ranks share.
    """
    if all(plan.near):
        return False
    return any(
        one.cut.box.num_elements
        and (not _near_holders(one, plan) or one.cut.box.contiguous_range(one.cut.shape) is None)
        for one in owned
    )


def _near_holders(one: OwnedBox, plan: Plan) -> list[int]:
    """Return the ranks that hold a box and see the first directory."""
    return [rank for rank in one.holders if plan.near[rank]]
