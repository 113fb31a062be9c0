"""The decision on how a store is opened, out of what all ranks see. Pure.

After a restart, any rank may be on any host. So the lowest rank that sees the store's first
directory is its writer, and each owner of parts is served by a rank that sees its directory. A
store that any rank sees is opened or refused, never made anew.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from offload.distributed.agreement.peers import Json, listed, tuples_of
from offload.distributed.agreement.sights import CheckpointSight, OwnerSight, Sight, StoreSight
from offload.errors import RanksError
from offload.units import many


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How all ranks open a store."""

    writer: int
    store_id: str
    is_new: bool
    checkpoint: tuple[int, int] | None
    """Step and generation of the newest checkpoint that is whole; None if there is none."""

    served_by: Mapping[int, int]
    """Rank that reads from each owner of which a directory was seen; by the owner's number."""

    homes: tuple[int, ...]
    """Owner into whose directory each rank writes; by rank. It is new if it is not in
    `served_by`."""

    directories: tuple[str, ...]
    """Directory of the store, on the rank's node, that has its owner's directory; by rank. For the
    writer it is the first directory."""

    near: tuple[bool, ...]
    """Whether each rank sees the first directory; by rank."""

    parts: tuple[tuple[int, str, str], ...] = ()
    """Usable parts that ranks have found: owner, name of the part, and digest of its table."""

    refused: tuple[tuple[int, str], ...]
    """Checkpoints that cannot be used, newest first: step, and why."""

    hosts: tuple[str, ...]

    def as_json(self) -> Json:
        """Return the plan as JSON."""
        return asdict(self) | {"served_by": [*self.served_by.items()]}

    @classmethod
    def from_json(cls, value: Json) -> Plan:
        """Return the plan of a message."""
        fields = tuples_of(value)
        return cls(**fields | {"served_by": dict(fields["served_by"])})


def plan_opening(sights: Sequence[Sight]) -> Plan:
    """Decide how a store is opened, by what each rank sees of it.

    Raises `RanksError`, which says which rank, on which host, lacks or has what.
    """
    _require_no_errors(sights)
    _require_same_lists(sights)
    fresh = sights[0].fresh
    seen = {rank: _only_store(sights, rank) for rank in range(len(sights))}
    stores = {rank: store for rank, store in seen.items() if store is not None}
    hosts = tuple(sight.host for sight in sights)
    if not stores:
        return Plan(
            writer=0,
            store_id=sights[0].new_id,
            is_new=True,
            checkpoint=None,
            served_by={},
            homes=tuple(range(len(sights))),
            directories=_directories(sights, range(len(sights)), {}),
            near=tuple(sight.node == sights[0].node for sight in sights),
            refused=(),
            hosts=hosts,
        )
    store_id = _require_one_store(sights, stores)
    stores = _without_leftovers(stores)
    _require_one_place(sights, stores)
    with_first = [rank for rank, store in stores.items() if store.place]
    if not with_first:
        raise RanksError(
            f"no rank sees the first directory of store {store_id}, but parts of it are there: "
            f"{_seen(sights, stores)}. Give the directory that has the checkpoints to one rank at "
            "least, or mount its drive"
        )
    writer = min(with_first)
    current = _owners_of_newest(stores[writer])
    served_by = _deal(stores, writer, current)
    owners = _homes(len(sights), served_by, stores[writer], current)
    chosen, refused = None, list[tuple[int, str]]()
    if not fresh:
        chosen, refused = _newest_whole(sights, stores, writer, served_by)
    return Plan(
        writer=writer,
        store_id=store_id,
        is_new=False,
        checkpoint=None if chosen is None else (chosen.step, chosen.generation),
        served_by=served_by,
        homes=owners,
        directories=_directories(sights, owners, stores),
        near=tuple(rank in with_first for rank in range(len(sights))),
        parts=tuple(
            (owner.owner, part.name, part.digest)
            for rank, store in stores.items()
            for owner in store.owners
            if served_by[owner.owner] == rank
            for part in owner.parts
            if not part.problem
        ),
        refused=tuple(refused),
        hosts=hosts,
    )


def _require_no_errors(sights: Sequence[Sight]) -> None:
    failed = [f"{_name(sights, rank)}: {s.error}" for rank, s in enumerate(sights) if s.error]
    if failed:
        raise RanksError("; ".join(failed))
    fresh = [rank for rank, sight in enumerate(sights) if sight.fresh]
    if fresh and len(fresh) < len(sights):
        other = next(rank for rank in range(len(sights)) if rank not in fresh)
        raise RanksError(
            f"{_name(sights, fresh[0])} was given fresh=True and {_name(sights, other)} was not: "
            "give all ranks the same"
        )


def _only_store(sights: Sequence[Sight], rank: int) -> StoreSight | None:
    stores = sights[rank].stores
    if len({store.store_id for store in stores}) > 1:
        ids = listed(sorted(store.store_id for store in stores))
        raise RanksError(
            f"{_name(sights, rank)} sees parts of several stores: {ids}. Give each store "
            "directories of its own"
        )
    firsts = [store.directory for store in stores if store.place]
    if len(firsts) > 1:
        raise RanksError(
            f"{_name(sights, rank)} sees {len(firsts)} copies of the first directory of the store: "
            f"{listed(firsts)}. Remove all but the one that was written last"
        )
    return stores[0] if stores else None


def _require_one_store(sights: Sequence[Sight], stores: Mapping[int, StoreSight]) -> str:
    by_id: dict[str, list[int]] = defaultdict(list)
    for rank, store in stores.items():
        by_id[store.store_id].append(rank)
    if len(by_id) > 1:
        seen = "; ".join(
            f"store {store_id} is seen by {_names(sights, ranks)}"
            for store_id, ranks in sorted(by_id.items())
        )
        raise RanksError(
            f"the ranks see {many(len(by_id), 'different store')}: {seen}. Give all ranks "
            "directories of one store, or give those that have none of it empty directories"
        )
    return next(iter(by_id))


def _require_one_place(sights: Sequence[Sight], stores: Mapping[int, StoreSight]) -> None:
    """Refuse copies: directories of the same store or owner that are not the same directory."""
    places: dict[tuple[str, int], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, store in stores.items():
        if store.place:
            places["the first directory", 0][store.place].append(rank)
        for owner in store.owners:
            places[f"the directory of owner {owner.owner}", owner.owner][owner.place].append(rank)
    for (what, _), found in places.items():
        if len(found) > 1:
            seen = "; ".join(f"one is seen by {_names(sights, found[p])}" for p in sorted(found))
            raise RanksError(
                f"there are {len(found)} copies of {what} of the store: {seen}. Remove all but "
                "the one that was written last"
            )


def _newest_whole(
    sights: Sequence[Sight],
    stores: Mapping[int, StoreSight],
    writer: int,
    served_by: Mapping[int, int],
) -> tuple[CheckpointSight | None, list[tuple[int, str]]]:
    """Return the newest checkpoint of which every part is whole, and those that were refused."""
    owners = {
        owner.owner: owner
        for rank, store in stores.items()
        for owner in store.owners
        if served_by[owner.owner] == rank
    }
    refused: list[tuple[int, str]] = []
    checkpoints = sorted(stores[writer].checkpoints, key=lambda c: c.generation, reverse=True)
    for checkpoint in checkpoints:
        problems = [checkpoint.problem] if checkpoint.problem else []
        if not problems:
            _require_owners(sights, stores, checkpoint, owners)
            for owner, name, digest in checkpoint.parts:
                problem = _problem_of(owners[owner], name, digest)
                if problem:
                    problems.append(f"{_name(sights, served_by[owner])}: {problem}")
        if not problems:
            return checkpoint, refused
        refused.append((checkpoint.step, "; ".join(problems)))
    if refused:
        told = "; ".join(f"step {step} ({problem})" for step, problem in refused)
        raise RanksError(
            f"no checkpoint of the store can be used: {told}. Nothing was changed. Repair or "
            "restore the parts that are named, or start over with fresh=True"
        )
    return None, refused


def _require_owners(
    sights: Sequence[Sight],
    stores: Mapping[int, StoreSight],
    checkpoint: CheckpointSight,
    owners: Mapping[int, OwnerSight],
) -> None:
    missing = sorted({owner for owner, _, _ in checkpoint.parts} - owners.keys())
    if missing:
        which = f"owner{'' if len(missing) == 1 else 's'} {listed([*map(str, missing)])}"
        raise RanksError(
            f"the checkpoint of step {checkpoint.step} has parts of {which}, and no rank sees "
            f"them: {_seen(sights, stores)}. Mount the drive that has owner-{missing[0]}, or give "
            "its directory to a rank on its host"
        )


def _problem_of(owner: OwnerSight, name: str, digest: str) -> str:
    for part in owner.parts:
        if part.name == name:
            if part.problem:
                return f"{name} of owner {owner.owner} cannot be used: {part.problem}"
            if part.digest != digest:
                return f"{name} of owner {owner.owner} has been written anew since"
            return ""
    return f"{name} of owner {owner.owner} is missing"


def _seen(sights: Sequence[Sight], stores: Mapping[int, StoreSight]) -> str:
    """Say what each rank sees of a store."""
    texts: list[str] = []
    for rank in range(len(sights)):
        store = stores.get(rank)
        found: list[str] = []
        if store is not None and store.place:
            found.append("the first directory")
        if store is not None:
            found += [f"owner {owner.owner}" for owner in store.owners]
        texts.append(f"{_name(sights, rank)} sees {listed(found) if found else 'nothing'}")
    return ", ".join(texts)


def _name(sights: Sequence[Sight], rank: int) -> str:
    return f"rank {rank} on {sights[rank].host}"


def _names(sights: Sequence[Sight], ranks: Iterable[int]) -> str:
    return listed([_name(sights, rank) for rank in ranks])


def _require_same_lists(sights: Sequence[Sight]) -> None:
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


def _without_leftovers(stores: Mapping[int, StoreSight]) -> dict[int, StoreSight]:
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


def _owners_of_newest(store: StoreSight) -> frozenset[int]:
    """Return the owners of the newest checkpoint that a rank sees; none if there is none."""
    whole = [one for one in store.checkpoints if not one.problem]
    if not whole:
        return frozenset()
    newest = max(whole, key=lambda one: one.generation)
    return frozenset({0, *(owner for owner, _, _ in newest.parts)})


def _deal(
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


def _homes(
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


def _directories(
    sights: Sequence[Sight], owners: Sequence[int], stores: Mapping[int, StoreSight]
) -> tuple[str, ...]:
    """Return the directory of the store, on its own node, in which each rank keeps its parts.

    An owner stays where its directory is. New ones are dealt over the directories that the ranks
    of a node were given, in their order.
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
