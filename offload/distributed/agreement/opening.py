"""The decision on how a store is opened, out of what all ranks see. Pure.

There is no stable mapping of ranks to hosts: after a restart, any rank may be on any of them. So
the roles are decided anew at each opening. The lowest rank that sees the store's first directory is
its writer, and each owner of parts is served by a rank that sees its directory. A store that any
rank sees is opened or refused, never made anew.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from offload.distributed.agreement.homes import (
    deal,
    directories,
    homes,
    owners_of_newest,
    require_same_lists,
    without_leftovers,
)
from offload.distributed.agreement.messages import Json, MessageError, check_fields, pairs_of
from offload.distributed.agreement.peers import listed
from offload.distributed.agreement.sights import CheckpointSight, OwnerSight, Sight, StoreSight
from offload.errors import RanksError
from offload.format.strict_json import short
from offload.units import many

_FIELDS = {
    "writer": int,
    "store_id": str,
    "is_new": bool,
    "checkpoint": object,
    "served_by": list,
    "homes": list,
    "directories": list,
    "near": list,
    "parts": list,
    "refused": list,
    "hosts": list,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How all ranks open a store."""

    writer: int
    """Rank that writes manifests, and renames checkpoints into place."""

    store_id: str
    """Identity of the store."""

    is_new: bool
    """Whether the store does not exist yet."""

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
    """Name of each rank's host."""

    def as_json(self) -> Json:
        """Return the plan as JSON."""
        return {
            "writer": self.writer,
            "store_id": self.store_id,
            "is_new": self.is_new,
            "checkpoint": None if self.checkpoint is None else list(self.checkpoint),
            "served_by": [list(pair) for pair in self.served_by.items()],
            "homes": list(self.homes),
            "directories": list(self.directories),
            "near": list(self.near),
            "parts": [list(part) for part in self.parts],
            "refused": [list(pair) for pair in self.refused],
            "hosts": list(self.hosts),
        }

    @classmethod
    def from_json(cls, value: Json) -> Plan:
        """Return the plan of a message."""
        where = "the plan for opening the store"
        found = check_fields(value, _FIELDS, where)
        chosen = found["checkpoint"]
        if chosen is not None and (
            not isinstance(chosen, list) or [type(one) for one in chosen] != [int, int]
        ):
            raise MessageError(f"{where} has no step and generation")
        if any(type(home) is not int for home in found["homes"]):
            raise MessageError(f"{where} has homes that are not numbers")
        for field in ("hosts", "directories"):
            if any(type(one) is not str for one in found[field]):
                raise MessageError(f"{where} has {field} without names")
        if any(type(one) is not bool for one in found["near"]):
            raise MessageError(f"{where} does not say who sees the first directory")
        for part in found["parts"]:
            if not isinstance(part, list) or [type(one) for one in part] != [int, str, str]:
                raise MessageError(f"{where} has the part {short(part)}")
        return cls(
            writer=found["writer"],
            store_id=found["store_id"],
            is_new=found["is_new"],
            checkpoint=None if chosen is None else (chosen[0], chosen[1]),
            served_by=dict(pairs_of(found["served_by"], int, int, where)),
            homes=tuple(found["homes"]),
            directories=tuple(found["directories"]),
            near=tuple(found["near"]),
            parts=tuple((owner, name, digest) for owner, name, digest in found["parts"]),
            refused=tuple(pairs_of(found["refused"], int, str, where)),
            hosts=tuple(found["hosts"]),
        )


def decide(sights: Sequence[Sight]) -> Plan:
    """Decide how a store is opened.

    Args:
        sights: What each rank sees, by rank.

    Raises:
        RanksError: The store cannot be opened. The message says which rank, on which host, lacks or
            has what.
    """
    _require_no_errors(sights)
    require_same_lists(sights)
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
            directories=directories(sights, range(len(sights)), {}),
            near=tuple(sight.node == sights[0].node for sight in sights),
            refused=(),
            hosts=hosts,
        )
    store_id = _require_one_store(sights, stores)
    stores = without_leftovers(stores)
    _require_one_place(sights, stores)
    with_first = [rank for rank, store in stores.items() if store.place]
    if not with_first:
        raise RanksError(
            f"no rank sees the first directory of store {store_id}, but parts of it are there: "
            f"{_seen(sights, stores)}. Give the directory that has the checkpoints to one rank at "
            "least, or mount its drive"
        )
    writer = min(with_first)
    current = owners_of_newest(stores[writer])
    served_by = deal(stores, writer, current)
    owners = homes(len(sights), served_by, stores[writer], current)
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
        directories=directories(sights, owners, stores),
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
