"""The plan of broadcasts: complete, bounded, in an order in which no two ranks block each other."""

from __future__ import annotations

import graphlib
from collections import Counter
from itertools import pairwise

import pytest

from offload.distributed.gathering.gather_plan import (
    BoxPiece,
    GatherPlan,
)
from offload.format.boxes import Box
from tests.ranks_gather.worlds import SLICE_BYTES, World, random_world


def elements(piece: BoxPiece) -> list[tuple[str, Box, int]]:
    return [(piece.name, piece.box, n) for n in range(piece.start, piece.stop)]


@pytest.mark.parametrize("kind", ["ddp", "mixed", "fsdp"])
def test_plans(kind: str) -> None:
    """What is sent where, and when, in many small models."""
    for seed in range(60):
        world = random_world(seed, 1 + seed % 5, kind, idle=seed % 3 == 0)
        plan = world.plan()
        assert_complete(world, plan)
        assert_ranks_cannot_block_each_other(world, plan)
        assert_sent_when_new(world, plan)
        if kind == "fsdp":
            assert plan.transfers == ()


def assert_complete(world: World, plan: GatherPlan) -> None:
    """Check that each updated element reaches each other holder once, and no other rank."""
    for transfer in plan.transfers:
        assert len(transfer.holders) > 1
        assert transfer.owner in transfer.holders
        assert {world.holders[piece.key] for piece in transfer.pieces} == {transfer.holders}
        assert {world.owners[piece.key] for piece in transfer.pieces} == {transfer.owner}
        assert len({piece.dtype for piece in transfer.pieces}) == 1
        assert sum(piece.nbytes for piece in transfer.pieces) == transfer.nbytes <= SLICE_BYTES
    for rank in range(world.num_ranks):
        needed = Counter(
            element
            for owner, chunks in enumerate(world.chunks)
            for chunk in chunks
            for piece in chunk.pieces
            if owner != rank and rank in world.holders[piece.key]
            for element in elements(piece)
        )
        arriving = Counter(
            element
            for transfer in plan.of(rank)
            if transfer.owner != rank
            for piece in transfer.pieces
            for element in elements(piece)
        )
        assert arriving == needed


def assert_ranks_cannot_block_each_other(world: World, plan: GatherPlan) -> None:
    """Check that the orders of all ranks together have no circle, whichever groups there are."""
    graph = graphlib.TopologicalSorter[int]()
    numbers = {id(transfer): n for n, transfer in enumerate(plan.transfers)}
    for rank in range(world.num_ranks):
        for before, after in pairwise(plan.of(rank)):
            graph.add(numbers[id(after)], numbers[id(before)])
    graph.prepare()


def assert_sent_when_new(world: World, plan: GatherPlan) -> None:
    """Check that values are sent in the round in which they are new."""
    assert plan.num_rounds == max(map(len, world.chunks))
    updated = {}
    for chunks in world.chunks:
        for number, chunk in enumerate(chunks):
            for piece in chunk.pieces:
                for element in elements(piece):
                    updated[element] = number
                    if piece.key in world.late:
                        same = [
                            n for n, c in enumerate(chunks) for p in c.pieces if p.key == piece.key
                        ]
                        updated[element] = max(same)
    for transfer in plan.transfers:
        for piece in transfer.pieces:
            assert all(updated[element] == transfer.round for element in elements(piece))
    rounds = [transfer.round for transfer in plan.transfers]
    assert rounds == sorted(rounds)
