"""Assignment of owners of parts to the ranks that serve them, and to directories. Pure."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from offload.distributed.agreement.sights import Sight, StoreSight
from offload.errors import RanksError


def require_same_lists(sights: Sequence[Sight]) -> None:
    """Check that all ranks of a node were given the same directories, in the same order."""
    firsts: dict[str, int] = {}
    for rank, sight in enumerate(sights):
        other = firsts.setdefault(sight.node, rank)
        theirs, own = sights[other].directories, sight.directories
        for a, b in zip(theirs, own, strict=False):
            if a.place != b.place:
                raise RanksError(
                    f"rank {rank} on {sight.host}: directory={b.path!r} is not the directory of "
                    f"rank {other}, which is {a.path!r}: give the same directories, in the same "
                    "order, to all ranks of a host. If each rank trains a separate model, pass "
                    "process_group=offload.SEPARATE"
                )
        if len(theirs) != len(own):
            raise RanksError(
                f"rank {rank} on {sight.host} was given {len(own)} directories and rank {other} "
                f"{len(theirs)}: give the same directories, in the same order, to all ranks of a "
                "host"
            )
        if len({one.place for one in own}) < len(own):
            raise RanksError(
                f"rank {rank} on {sight.host} was given a directory twice: "
                f"{', '.join(one.path for one in own)}"
            )


def without_leftovers(stores: Mapping[int, StoreSight]) -> dict[int, StoreSight]:
    """Return what ranks see of a store, without empty directories that other runs have left.

    An owner has one directory. If there are several, those without a sealed part do not count, or
    all but the first if none has one: a run that ended before its first checkpoint has left them.
    """
    places: dict[int, dict[str, bool]] = defaultdict(dict)
    for _, store in sorted(stores.items()):
        for owner in store.owners:
            places[owner.owner][owner.place] = bool(owner.parts)
    counted: dict[int, set[str]] = {}
    for number, found in places.items():
        sealed = {place for place, has_parts in found.items() if has_parts}
        counted[number] = sealed or {next(iter(found))}
    return {
        rank: replace(store, owners=tuple(o for o in store.owners if o.place in counted[o.owner]))
        for rank, store in stores.items()
    }


def owners_of_newest(store: StoreSight) -> frozenset[int]:
    """Return the owners of the newest checkpoint that a rank sees; none if there is none."""
    whole = [one for one in store.checkpoints if not one.problem]
    if not whole:
        return frozenset()
    newest = max(whole, key=lambda one: one.generation)
    return frozenset({0, *(owner for owner, _, _ in newest.parts)})


def deal(
    stores: Mapping[int, StoreSight], writer: int, current: Collection[int] = ()
) -> dict[int, int]:
    """Return the rank that serves each owner: the one of those that see it with the least to do."""
    candidates: dict[int, list[int]] = defaultdict(list)
    for rank, store in sorted(stores.items()):
        for owner in store.owners:
            candidates[owner.owner].append(rank)
    load: dict[int, int] = defaultdict(int)
    candidates[0] = [writer]  # its directory is the first
    positions = {owner: number for number, owner in enumerate(sorted(current or candidates))}
    served_by: dict[int, int] = {}

    def order(item: tuple[int, list[int]]) -> tuple[bool, int, int]:
        """Put directories with a known position first, then those that the fewest ranks see."""
        number, ranks = item
        return number not in positions, len(ranks), number

    for number, ranks in sorted(candidates.items(), key=order):
        own = positions.get(number)
        server = min(ranks, key=lambda rank: (load[rank], rank != own, rank))
        served_by[number] = server
        load[server] += 1
    return dict(sorted(served_by.items()))


def homes(
    size: int, served_by: Mapping[int, int], store: StoreSight, current: Collection[int] = ()
) -> tuple[int, ...]:
    """Return the owner into whose directory each rank writes, by rank."""
    named = {owner for checkpoint in store.checkpoints for owner, _, _ in checkpoint.parts}
    taken = {0, *served_by, *named}
    if current and len(current) != size and served_by[0] == 0:
        rising: list[int] = []
        for rank in range(size):
            least = rising[-1] + 1 if rising else 0
            own = [owner for owner, by in served_by.items() if by == rank and owner >= least]
            free = (number for number in itertools.count(least) if number not in taken)
            rising.append(min(own) if own else next(free))
        return tuple(rising)
    by_preference = sorted(served_by.items(), key=lambda item: (item[0] in current, -item[0]))
    by_rank = {rank: owner for owner, rank in by_preference}
    for rank in range(size):
        if rank not in by_rank:
            by_rank[rank] = rank if rank not in taken else max(taken) + 1
            taken.add(by_rank[rank])
    return tuple(by_rank[rank] for rank in range(size))


def directories(
    sights: Sequence[Sight], owners: Sequence[int], stores: Mapping[int, StoreSight]
) -> tuple[str, ...]:
    """Return the directory of the store, on its own node, in which each rank keeps its parts.

    An owner stays where its directory is. New ones are dealt over the directories that the ranks
    of a node were given, in their order.

    Args:
        sights: What each rank sees.
        owners: Owner into whose directory each rank writes. Owner 0 is the first directory.
        stores: What each rank sees of the store, by rank; a new store is seen by none.
    """
    found: list[str] = []
    ranks_on: dict[str, int] = defaultdict(int)
    for rank, sight in enumerate(sights):
        number = ranks_on[sight.node]
        ranks_on[sight.node] += 1
        given = [one.path for one in sight.directories] or [""]
        directory = given[number % len(given)] if owners[rank] else given[0]
        store = stores.get(rank)
        if store is not None and owners[rank] == 0:
            directory = store.directory
        for owner in () if store is None else store.owners:
            if owner.owner == owners[rank]:
                directory = owner.directory
        found.append(directory)
    return tuple(found)
