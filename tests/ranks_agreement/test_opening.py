"""Decisions on opening a store, over many combinations of what ranks see.

`plan_opening` is called as it is: real ranks open stores in `tests/ranks_training`, but not in this
many combinations of hosts and marks.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.distributed.agreement.opening import Plan, plan_opening
from offload.distributed.agreement.sights import (
    CheckpointSight,
    OwnerSight,
    PartSight,
    Sight,
    StoreSight,
)
from offload.errors import RanksError

STORE = "a" * 32


def checkpoint(generation: int, owners: list[int]) -> CheckpointSight:
    parts = tuple((owner, f"part-{generation}", f"digest {generation}") for owner in owners)
    return CheckpointSight(step=10 * generation, generation=generation, parts=parts)


def owner_sight(owner: int, generations: list[int], **problems: str) -> OwnerSight:
    parts = tuple(
        PartSight(name=f"part-{g}", digest=f"digest {g}", problem=problems.get(f"g{g}", ""))
        for g in generations
    )
    return OwnerSight(owner=owner, place=f"place of {owner}", parts=parts)


def sight(
    rank: int,
    *owners: OwnerSight,
    first: tuple[CheckpointSight, ...] | None = None,
    store_id: str = STORE,
) -> Sight:
    stores = ()
    if owners or first is not None:
        store = StoreSight(
            store_id=store_id,
            place="" if first is None else "the first directory",
            checkpoints=first or (),
            owners=owners,
        )
        stores = (store,)
    return Sight(host=f"node-{rank}", new_id=f"{rank:032x}", stores=stores)


@settings(max_examples=60)
@given(st.data())
def test_any_mapping_of_ranks_to_nodes_finds_the_newest_whole_checkpoint(
    data: st.DataObject,
) -> None:
    """The oracle: a checkpoint is whole if each of its parts is seen by someone, unmarked."""
    num_owners = data.draw(st.integers(0, 4))
    owners = list(range(1, num_owners + 1))
    generations = data.draw(st.lists(st.integers(1, 9), unique=True, min_size=1, max_size=4))
    marked = data.draw(
        st.sets(st.tuples(st.sampled_from([*owners, 99]), st.sampled_from(generations)))
    )
    size = data.draw(st.integers(1, 5))
    sees = {o: data.draw(st.sets(st.integers(0, size - 1), min_size=1)) for o in owners}
    with_first = data.draw(st.sets(st.integers(0, size - 1), min_size=1))
    first = tuple(checkpoint(g, owners) for g in generations)
    sights = [
        sight(
            rank,
            *[
                owner_sight(o, generations, **{f"g{g}": "marked" for m, g in marked if m == o})
                for o in owners
                if rank in sees[o]
            ],
            first=first if rank in with_first else None,
        )
        for rank in range(size)
    ]
    whole = [g for g in generations if not any((o, g) in marked for o in owners)]
    if not whole:
        with pytest.raises(RanksError, match="no checkpoint of the store can be used"):
            plan_opening(sights)
        return
    plan = plan_opening(sights)
    assert plan.checkpoint == (10 * max(whole), max(whole))
    assert [step for step, _ in plan.refused] == [
        10 * g for g in sorted(generations, reverse=True) if g > max(whole)
    ]
    assert plan.writer == min(with_first)
    assert plan.served_by[0] == plan.writer
    assert plan.served_by.keys() == {0, *owners}
    assert all(plan.served_by[o] in sees[o] for o in owners)
    assert len(set(plan.homes)) == size
    assert plan.homes[plan.writer] == 0
    for rank, home in enumerate(plan.homes):
        assert plan.served_by.get(home, rank) == rank
    assert not plan.is_new
    assert plan.store_id == STORE
    assert Plan.from_json(plan.as_json()) == plan
    assert [Sight.from_json(one.as_json()) for one in sights] == sights


def test_a_missing_owner_is_named_with_the_rank_that_lacks_it() -> None:
    """It is never passed over, also if an earlier checkpoint needs no owner."""
    first = (checkpoint(1, []), checkpoint(2, [1, 2]))
    sights = [sight(0, first=first), sight(1, owner_sight(1, [2])), sight(2)]
    for order in itertools.permutations(sights):
        with pytest.raises(RanksError, match="owner-2") as error:
            plan_opening(order)
        lacking = order.index(sights[2])
        assert f"rank {lacking} on node-2 sees nothing" in str(error.value)


def test_a_new_store_is_made_if_nobody_sees_one_and_fresh_starts_over_in_the_same() -> None:
    plan = plan_opening([sight(0), sight(1), sight(2)])
    assert (plan.is_new, plan.writer, plan.homes) == (True, 0, (0, 1, 2))
    assert plan.store_id == sight(0).new_id
    sights = [sight(0, first=(checkpoint(1, [1]),)), sight(1)]
    plan = plan_opening([replace(one, fresh=True) for one in sights])
    assert (plan.checkpoint, plan.is_new, plan.store_id) == (None, False, STORE)
    assert plan.homes == (0, 2)  # owner 1 is named by a checkpoint that is there still


FIRST = sight(0, first=())
BOTH = (*FIRST.stores, *sight(0, first=(), store_id="b").stores)
ELSEWHERE = replace(FIRST.stores[0], place="another directory")
PART = owner_sight(1, [3])
REFUSED = {
    "parts without a first directory": (
        [sight(0), sight(1, PART)],
        "no rank sees the first directory",
    ),
    "also with fresh": (
        [replace(sight(0), fresh=True), replace(sight(1, PART), fresh=True)],
        "no rank sees the first directory",
    ),
    "fresh on one rank": (
        [replace(FIRST, fresh=True), sight(1)],
        "rank 0 on node-0 was given fresh=True and rank 1",
    ),
    "two stores": (
        [FIRST, sight(1), sight(2, first=(), store_id="b" * 32)],
        f"store {STORE} is seen by rank 0 on node-0; store bbbb",
    ),
    "one rank with two stores": (
        [replace(FIRST, stores=BOTH), sight(1)],
        "rank 0 on node-0 sees parts of several stores",
    ),
    "copies of the first directory": (
        [FIRST, replace(sight(1), stores=(ELSEWHERE,))],
        "2 copies of the first directory",
    ),
    "copies of a part": (
        [sight(0, PART, first=()), sight(1, replace(PART, place="another directory"))],
        "2 copies of the directory of owner 1",
    ),
    "an error of one rank": (
        [FIRST, replace(sight(1), error="run/LOCK is held by process 7")],
        "rank 1 on node-1: run/LOCK is held by process 7",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_together_is_an_error_of_all(case: str) -> None:
    sights, words = REFUSED[case]
    with pytest.raises(RanksError, match=words):
        plan_opening(sights)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([], "part-1 of owner 1 is missing"),
        ([PartSight(name="part-1", digest="other")], "has been written anew since"),
        ([PartSight(name="part-1", digest="digest 1", problem="marked")], "be used: marked"),
    ],
    ids=["missing", "rewritten", "marked"],
)
def test_a_part_that_is_not_whole_is_named_with_its_rank(
    parts: list[PartSight], words: str
) -> None:
    owner = OwnerSight(owner=1, place="p", parts=tuple(parts))
    sights = [sight(0, first=(checkpoint(1, [1]),)), sight(1, owner)]
    with pytest.raises(RanksError, match=words) as error:
        plan_opening(sights)
    assert "rank 1 on node-1" in str(error.value)
