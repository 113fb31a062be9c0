"""The plan of broadcasts: complete, bounded, in an order in which no two ranks block each other."""

from __future__ import annotations

import graphlib
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.distributed.gathering.gather_plan import (
    BoxPiece,
    GatherPlan,
    RankChunk,
    deal_reading,
    layout_chunks,
)
from offload.format.boxes import Box, Cut
from offload.format.header import DTYPE_BYTES
from offload.format.layout import Layout, ParameterSpec
from tests.ranks_gather.worlds import SLICE_BYTES, World, random_world

worlds = st.builds(
    random_world,
    st.integers(0, 1 << 30),
    st.integers(1, 5),
    st.sampled_from(["ddp", "mixed"]),
    idle=st.booleans(),
)


def elements(piece: BoxPiece) -> list[tuple[str, Box, int]]:
    return [(piece.name, piece.box, n) for n in range(piece.start, piece.stop)]


@given(worlds)
def test_each_updated_element_reaches_each_other_holder_once(world: World) -> None:
    plan = world.plan()
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


@given(worlds)
def test_no_rank_takes_part_in_what_it_neither_has_nor_needs(world: World) -> None:
    for transfer in world.plan().transfers:
        assert len(transfer.holders) > 1
        assert transfer.owner in transfer.holders
        for piece in transfer.pieces:
            assert world.holders[piece.key] == transfer.holders
            assert world.owners[piece.key] == transfer.owner


@given(worlds)
def test_ranks_cannot_block_each_other(world: World) -> None:
    """The orders of all ranks together have no circle, whichever groups the broadcasts are on."""
    plan = world.plan()
    graph = graphlib.TopologicalSorter[int]()
    numbers = {id(transfer): n for n, transfer in enumerate(plan.transfers)}
    for rank in range(world.num_ranks):
        for before, after in pairwise(plan.of(rank)):
            graph.add(numbers[id(after)], numbers[id(before)])
    graph.prepare()


@given(worlds)
def test_values_are_sent_in_the_round_in_which_they_are_new(world: World) -> None:
    plan = world.plan()
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
    sent = [
        (element, transfer.round)
        for transfer in plan.transfers
        for piece in transfer.pieces
        for element in elements(piece)
    ]
    assert all(updated[element] == number for element, number in sent)
    rounds = [transfer.round for transfer in plan.transfers]
    assert rounds == sorted(rounds)


@given(worlds)
def test_a_broadcast_has_the_bytes_of_its_pieces_and_at_most_a_slice(world: World) -> None:
    for transfer in world.plan().transfers:
        sizes = [piece.nbytes for piece in transfer.pieces]
        assert all(sizes)
        assert sum(sizes) == transfer.nbytes <= SLICE_BYTES
        assert len({piece.dtype for piece in transfer.pieces}) == 1
        assert transfer.sizes == tuple(piece.stop - piece.start for piece in transfer.pieces)


@given(st.integers(0, 1 << 30), st.integers(1, 5))
def test_boxes_with_one_holder_cause_no_traffic(seed: int, num_ranks: int) -> None:
    plan = random_world(seed, num_ranks, "fsdp").plan()
    assert plan.transfers == ()
    assert plan.holder_sets == []


def test_ranks_without_chunks_take_part() -> None:
    box = Box.whole((4,))
    own = [RankChunk(n, (BoxPiece(f"t{n}", box, "F32", 0, 4),)) for n in range(5)]
    plan = GatherPlan([own, []], {(f"t{n}", box): (0, 1) for n in range(5)})
    assert plan.num_rounds == 5
    assert len(plan.of(1)) == 5
    assert plan.of(0) == plan.of(1)


def test_sixteen_bit_values_are_sent_in_two_bytes_and_others_in_four() -> None:
    box = Box.whole((1000,))
    for dtype, size in (("F32", 4), ("BF16", 2), ("F16", 2)):
        own = [RankChunk(0, (BoxPiece("t", box, dtype, 0, 1000),))]
        plan = GatherPlan([own, []], {("t", box): (0, 1)})
        assert [transfer.nbytes for transfer in plan.transfers] == [1000 * size]


def test_owners_take_turns_within_a_round() -> None:
    box = Box.whole((1000,))
    chunks = [[RankChunk(0, (BoxPiece(f"t{rank}", box, "F32", 0, 1000),))] for rank in range(3)]
    holders = {(f"t{rank}", box): (0, 1, 2) for rank in range(3)}
    plan = GatherPlan(chunks, holders, slice_bytes=2000)
    assert [transfer.owner for transfer in plan.transfers] == [0, 1, 2, 0, 1, 2]


def whole(stop: int = 4) -> BoxPiece:
    return BoxPiece("t", Box.whole((4,)), "F32", 0, stop)


@pytest.mark.parametrize(
    ("chunks", "holders", "said"),
    [
        ([[RankChunk(0, (whole(),))], []], (1,), "rank 0 of 2 updates t"),
        ([[RankChunk(0, (whole(),))], []], (), "rank 0 of 2 updates t"),
        ([[RankChunk(0, (whole(),))], []], (1, 0), "expected ascending ranks"),
        ([[RankChunk(0, (whole(),))], []], (0, 0, 1), "expected ascending ranks"),
        ([[RankChunk(0, (whole(),))], []], (0, 2), "expected ascending ranks"),
        ([[RankChunk(0, (whole(5),))], []], (0, 1), "not within"),
        ([[RankChunk(0, (whole(),))], [RankChunk(0, (whole(),))]], (0, 1), "overlap"),
        ([[RankChunk(0, (whole(2), whole(3)))], []], (0, 1), "overlap"),
        ([[RankChunk(0, (whole(),)), RankChunk(0, ())], []], (0, 1), "twice"),
    ],
)
def test_chunks_that_do_not_fit_are_refused(
    chunks: list[list[RankChunk]], holders: tuple[int, ...], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        GatherPlan(chunks, {("t", Box.whole((4,))): holders})


def test_slices_must_be_aligned() -> None:
    with pytest.raises(ValueError, match="multiple of 8"):
        GatherPlan([[]], {}, slice_bytes=1001)


def two_layouts() -> list[Layout]:
    """Rows 0 to 6 of `a` and all of `b` are on rank 0, the rest of `a` on rank 1; `c` likewise."""
    a = [Box((0, 0), (6, 8)), Box((6, 0), (4, 8))]
    specs = [
        [
            ParameterSpec("a", "F32", a[0].sizes, 0, ("exp_avg",), Cut((10, 8), a[0])),
            ParameterSpec("b", "BF16", (16,), 0, ("master",)),
        ],
        [
            ParameterSpec("a", "F32", a[1].sizes, 0, ("exp_avg",), Cut((10, 8), a[1])),
            ParameterSpec("c", "BF16", (2000,), 0, ("master",)),
        ],
    ]
    return [Layout(tuple(own), (), 1024) for own in specs]


def test_chunks_of_layouts_hold_all_elements_of_their_boxes() -> None:
    layouts = two_layouts()
    for layout in layouts:
        found = Counter(
            element
            for chunk in layout_chunks(layout)
            for piece in chunk.pieces
            for element in elements(piece)
        )
        boxes = [(p.name, p.cut.box if p.cut else Box.whole(p.shape)) for p in layout.parameters]
        assert found == Counter((n, box, e) for n, box in boxes for e in range(box.num_elements))
    assert [chunk.number for chunk in layout_chunks(layouts[1])] == [0, 1, 2][
        : layouts[1].num_chunks
    ]


def test_chunks_of_a_layout_come_in_the_order_of_the_step() -> None:
    layout = two_layouts()[1]
    assert [chunk.number for chunk in layout_chunks(layout, order=[1, 0])] == [1, 0]


def test_a_step_of_few_parameters_has_few_rounds() -> None:
    layout = two_layouts()[1]
    (chunk,) = layout_chunks(layout, stepped={"a"})
    assert {piece.name for piece in chunk.pieces} == {"a"}


@given(worlds, st.integers(8, 5000))
def test_every_byte_is_read_once_by_a_holder(world: World, chunk_bytes: int) -> None:
    boxes = {key: world.tensors[key[0]][1] for key in world.holders}
    dealt = deal_reading(boxes, world.holders, world.num_ranks, chunk_bytes=chunk_bytes)
    read = Counter(
        element
        for rank, chunks in enumerate(dealt)
        for chunk in chunks
        for piece in chunk.pieces
        for element in elements(piece)
        if rank in world.holders[piece.key]
    )
    assert read == Counter((n, box, e) for n, box in boxes for e in range(box.num_elements))
    for chunks in dealt:
        assert all(sum(p.nbytes for p in chunk.pieces) <= chunk_bytes for chunk in chunks)
    GatherPlan(dealt, world.holders)  # it accepts them


@given(st.integers(0, 1 << 30), st.integers(1, 5), st.integers(8, 500))
def test_reading_is_balanced_if_all_ranks_hold_everything(
    seed: int, num_ranks: int, chunk_bytes: int
) -> None:
    world = random_world(seed, num_ranks, "ddp")
    boxes = {key: world.tensors[key[0]][1] for key in world.holders}
    dealt = deal_reading(boxes, world.holders, num_ranks, chunk_bytes=chunk_bytes)
    loads = [sum(p.nbytes for c in chunks for p in c.pieces) for chunks in dealt]
    assert max(loads) - min(loads) <= max(chunk_bytes, *DTYPE_BYTES.values())
