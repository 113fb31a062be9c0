"""Where the state of several drives lies: each element once, in proportion, and for good."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.format import Layout, ModelTensor, ParameterSpec
from offload.format.boxes import cut_range
from offload.stream.drives import proportional_shares

CHUNK = 1024
ADAM = ("exp_avg", "exp_avg_sq")


def layout(
    sizes: list[int],
    shares: tuple[int, ...] = (1,),
    state_dtype: str = "float32",
    counts_from: str = "parameter",
) -> Layout:
    """Lay out parameters, of which every third is FP32 and every fifth has one array less."""
    specs, model = [], []
    for index, size in enumerate(sizes):
        dtype = "F32" if index % 3 == 2 else "BF16"
        moments = ADAM[: 1 if index % 5 == 4 else 2]
        if state_dtype == "int8":
            moments = tuple(name for m in moments for name in (m, f"{m}_scale"))
        arrays = (*(() if dtype == "F32" else ("master",)), *moments)
        specs.append(ParameterSpec(f"p{index}", dtype, (size,), 0, arrays))
        model.append(ModelTensor(f"p{index}", dtype, (size,)))
    return Layout(tuple(specs), tuple(model), CHUNK, state_dtype, shares, counts_from)


# Often such that one ends shortly after the edge of a chunk, where edges move.
near_edges = st.tuples(st.integers(0, 3), st.integers(-40, 40)).map(lambda n: n[0] * CHUNK + n[1])
sizes = st.lists(
    st.one_of(st.integers(0, 5 * CHUNK), near_edges.filter(lambda n: n >= 0)),
    min_size=1,
    max_size=8,
)
rules = st.sampled_from(
    [("float32", "parameter"), ("bfloat16", "parameter"), ("int8", "parameter"), ("int8", "chunk")]
)
shares = st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple)


@settings(deadline=None, max_examples=40)
@given(sizes, rules)
def test_chunks_are_ranges_end_to_end_which_hold_whole_blocks(sizes, rule):
    found = layout(sizes, (1,), *rule)
    ranges = [(plan.first, plan.last) for plan in found.plans]
    assert [0, *(stop for _, stop in ranges)] == [
        *(start for start, _ in ranges), found.num_elements,
    ]  # fmt: skip
    assert all(start < stop for start, stop in ranges)
    moved = rule == ("int8", "parameter")
    for chunk, (start, _) in enumerate(ranges):
        assert chunk * CHUNK <= start <= chunk * CHUNK + (31 if moved else 0)
        for piece in found.plans[chunk].pieces:
            assert not moved or piece.start % 32 == 0
    whole = [
        (piece.parameter, element)
        for chunk in range(found.num_chunks)
        for piece in found.plans[chunk].pieces
        for element in range(piece.start, piece.stop)
    ]
    assert whole == [(n, e) for n, size in enumerate(sizes) for e in range(size)]
    if rule[0] == "int8":  # and each block has one scale
        scales = 0
        for chunk in range(found.num_chunks):
            offset, nbytes = found.byte_range("exp_avg_scale", chunk)
            assert offset == found.array_headers[0]["exp_avg_scale"].data_start + 2 * scales
            lengths = [piece.stop - piece.start for piece in found.plans[chunk].pieces]
            assert nbytes == 2 * sum(-(-length // 32) for length in lengths)
            scales += nbytes // 2
        assert scales == sum(-(-size // 32) for size in sizes) or not moved
    if rule[1] == "parameter":  # what is stored on one drive does not depend on chunks
        assert found.array_headers == replace(found, chunk_elements=1 << 20).array_headers


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        ([7.0], (1,)),
        ([3.1, 3.0], (1, 1)),
        ([7.0, 3.0], (7, 3)),
        ([12.0, 0.1], (63, 1)),
    ],
    ids=str,
)
def test_speeds_become_small_whole_shares(speeds, expected):
    found = proportional_shares(speeds)
    assert sum(found) <= 64
    assert [s / sum(found) for s in found] == pytest.approx(
        [s / sum(expected) for s in expected], rel=0.06
    )


def test_a_last_chunk_whose_beginning_moves_to_the_end_does_not_exist():
    """The second chunk would begin in a block of 32 that ends with the parameter."""
    found = layout([10, CHUNK - 4], state_dtype="int8")
    assert found.num_chunks == 1
    assert (found.plans[0].first, found.plans[0].last) == (0, CHUNK + 6)
    assert layout([10, CHUNK + 30], state_dtype="int8").num_chunks == 2


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (2, 3, 4), (4, 1, 2, 3), (1, 1, 9)], ids=str)
def test_boxes_tile_every_range_in_order(shape):
    numbers = np.arange(math.prod(shape)).reshape(shape)
    for start in range(numbers.size):
        for stop in range(start + 1, numbers.size + 1):
            found = []
            for box in cut_range(shape, start, stop):
                found += numbers[box.slices].flatten().tolist()
            assert found == list(range(start, stop))
