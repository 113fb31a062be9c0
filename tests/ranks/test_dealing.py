"""Which rank steps which box: parameters dealt by rows, and owners of boxes that ranks hold."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from offload.format.boxes import Box, Cut
from offload.format.shares.dealing import BoxesError, deal_rows, own_boxes

SHAPES = [
    {"w": (7, 3), "b": (5,), "s": ()},
    {"a": (1, 100), "b": (100, 1), "c": (3, 4, 5)},
    {"empty": (0, 8), "v": (33,), "also": (4, 0), "w": (10, 10)},
    {"s": (), "t": (), "u": ()},
    {"w": (64, 48), "v": (100,), "x": (31, 33)},
    {},
]


def covered(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    """Return whether boxes have every element of a shape once, by filling a tensor."""
    count = torch.zeros(shape, dtype=torch.int64)
    for box in boxes:
        count[box.slices] += 1
    return bool((count == 1).all())


LAYERS = {f"layer{n}.{name}": shape for n in range(6) for name, shape in SHAPES[4].items()}
SPANS = [1, 100, 4000, 9000, 10**9]


@pytest.mark.parametrize("multiple", [1, 32])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 17])
def test_every_element_is_dealt_once_in_order_and_in_balance(num_ranks: int, multiple: int) -> None:
    for shapes, span in [*((shapes, None) for shapes in SHAPES), *((LAYERS, n) for n in SPANS)]:
        dealt = deal_rows(shapes, num_ranks, multiple, span_elements=span)
        assert len(dealt) == num_ranks
        assert dealt == deal_rows(shapes, num_ranks, multiple, span_elements=span)
        order = [*shapes]
        for view in dealt:
            names = [name for name, _ in view]
            assert names == sorted({*names}, key=order.index)
        units = [multiple]
        for name, shape in shapes.items():
            cuts = [cut for view in dealt for n, cut in view if n == name]
            boxes = [cut.box for cut in cuts]
            assert covered(shape, boxes)
            assert all(cut.shape == shape for cut in cuts)
            if math.prod(shape):  # no cut is inside a row or a block
                unit = math.lcm(math.prod(shape[1:]), multiple)
                ends = [box.contiguous_range(shape) for box in boxes]
                assert all(end is not None and end[0] % unit == 0 for end in ends)
                units.append(unit)
        each = sum(map(math.prod, shapes.values())) / num_ranks
        for view in dealt:
            assert abs(sum(cut.box.num_elements for _, cut in view) - each) <= max(units)


def test_each_rank_has_a_share_of_every_span() -> None:
    shapes = {f"layer{n}": (8, 4) for n in range(6)}
    dealt = deal_rows(shapes, 2, span_elements=64)
    halves = [[f"layer{n}" for n in range(rank, 6, 2)] for rank in range(2)]
    assert [[name for name, _ in view] for view in dealt] == halves
    assert deal_rows(shapes, 2, span_elements=32) == [
        [(name, Cut((8, 4), Box((4 * rank, 0), (4, 4)))) for name in shapes] for rank in range(2)
    ]


def test_rows_are_cut_where_a_hand_would_cut_them() -> None:
    dealt = deal_rows({"w": (4, 4), "v": (8,)}, 3)
    assert dealt == [
        [("w", Cut((4, 4), Box((0, 0), (2, 4))))],
        [("w", Cut((4, 4), Box((2, 0), (2, 4))))],
        [("v", Cut((8,), Box((0,), (8,))))],
    ]


def grid(shape: tuple[int, int], rows: int, columns: int) -> list[Cut]:
    """Return the boxes of a mesh of ranks, as DTensors are sharded by it: sizes rounded up."""
    step = -(-shape[0] // rows), -(-shape[1] // columns)
    cuts = []
    for row, column in itertools.product(range(rows), range(columns)):
        at = min(row * step[0], shape[0]), min(column * step[1], shape[1])
        sizes = min(step[0], shape[0] - at[0]), min(step[1], shape[1] - at[1])
        cuts.append(Cut(shape, Box(at, sizes)))
    return cuts


def test_each_distinct_box_has_one_owner_and_all_its_holders() -> None:
    # Replicas along the first dimension of a mesh of 2 x 3 ranks; a vector whole on every rank.
    shards = grid((7, 5), 3, 1)
    views = [[("w", shards[rank % 3]), ("v", Cut((4,), Box((0,), (4,))))] for rank in range(6)]
    owned = own_boxes(views)
    assert {(o.name, o.cut.box): o.holders for o in owned} == {
        ("w", shards[0].box): (0, 3),
        ("w", shards[1].box): (1, 4),
        ("w", shards[2].box): (2, 5),
        ("v", Box((0,), (4,))): (0, 1, 2, 3, 4, 5),
    }
    assert all(o.owner in o.holders for o in owned)
    assert [o.owner for o in owned] == sorted(o.owner for o in owned)
    assert owned == own_boxes(views)


def test_owners_are_balanced_by_elements() -> None:
    shapes = {f"p{n}": (size,) for n, size in enumerate([50, 40, 30, 20, 10, 10, 10, 10])}
    whole = [(name, Cut(shape, Box.whole(shape))) for name, shape in shapes.items()]
    owned = own_boxes([whole] * 3)
    loads = [sum(o.cut.box.num_elements for o in owned if o.owner == rank) for rank in range(3)]
    assert loads == [60, 60, 60]


def test_a_rank_without_choice_is_given_less_of_what_is_shared() -> None:
    big, small = Cut((9,), Box((0,), (9,))), Cut((4,), Box((0,), (4,)))
    owned = own_boxes([[("own", big), ("shared", small)], [("shared", small)]])
    assert {o.name: o.owner for o in owned} == {"own": 0, "shared": 1}


def test_empty_shards_own_nothing() -> None:
    shards = grid((2, 3), 4, 1)
    owned = own_boxes([[("w", cut)] for cut in shards])
    assert [(o.owner, o.cut.box.sizes) for o in owned] == [(0, (1, 3)), (1, (1, 3))]


def test_a_parameter_without_elements_has_one_owner() -> None:
    shape = (0, 3)
    views = [[("w", Cut(shape, Box((0, 0), (0, 3))))]] * 3
    (owned,) = own_boxes(views)
    assert owned.holders == (0, 1, 2)
    assert owned.cut == Cut(shape, Box.whole(shape))


def test_overlaps_are_refused_by_name() -> None:
    shape = (4, 4)
    views = [
        [("layer.w", Cut(shape, Box((0, 0), (3, 4))))],
        [("layer.w", Cut(shape, Box((2, 0), (2, 4))))],
    ]
    with pytest.raises(BoxesError) as caught:
        own_boxes(views)
    error = caught.value
    assert error.name == "layer.w"
    assert error.ranks == (0, 1)
    assert error.boxes == (Box((0, 0), (3, 4)), Box((2, 0), (2, 4)))
    for text in ("'layer.w'", "[0:3, 0:4] of rank 0", "[2:4, 0:4] of rank 1", "[2:3, 0:4]"):
        assert text in str(error)


def test_gaps_are_refused_by_name() -> None:
    cut = Cut((4, 4), Box((0, 0), (3, 4)))
    with pytest.raises(BoxesError, match=r"'w'.*12 of its 16 elements: \[0:3, 0:4\] of ranks 0, 2"):
        own_boxes([[("w", cut)], [], [("w", cut)]])


def test_other_shapes_are_refused_by_name() -> None:
    one, two = Cut((4,), Box((0,), (4,))), Cut((5,), Box((0,), (5,)))
    with pytest.raises(BoxesError, match=r"'v' has the shape \[4\] on rank 0 and \[5\] on rank 1"):
        own_boxes([[("v", one)], [("v", two)]])


def test_random_boxes_are_accepted_exactly_if_they_tile_the_shape() -> None:
    source = random.Random(3)
    outcomes = set()
    for _ in range(400):
        shape = (source.randint(1, 4), source.randint(1, 3))
        rows, columns = source.randint(1, 3), source.randint(1, 2)
        cuts = grid(shape, rows, columns)
        if source.random() < 0.5:
            at = source.randrange(len(cuts))
            offsets = tuple(source.randrange(n) for n in shape)
            sizes = tuple(source.randint(1, n - o) for n, o in zip(shape, offsets, strict=True))
            cuts[at] = Cut(shape, Box(offsets, sizes))
        boxes = list({cut.box for cut in cuts if cut.box.num_elements})
        fits = covered(shape, boxes)
        outcomes.add(fits)
        try:
            own_boxes([[("w", cut)] for cut in cuts])
        except BoxesError:
            assert not fits
        else:
            assert fits
    assert outcomes == {True, False}
