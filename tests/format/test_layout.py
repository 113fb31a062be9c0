"""What no file shows at once: speeds as shares, chunks that end near a parameter, boxes of ranges.

`test_spec_drives.py` and `test_spec_state.py` read from files where the state lies.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from offload.format import Layout, ModelTensor, ParameterSpec
from offload.format.boxes import cut_range
from offload.stream.drives import proportional_shares

CHUNK = 1024


def int8_layout(*sizes: int) -> Layout:
    arrays = ("master", "exp_avg", "exp_avg_scale")
    named = [(f"p{number}", "BF16", (size,)) for number, size in enumerate(sizes)]
    specs = tuple(ParameterSpec(*one, 0, arrays) for one in named)
    return Layout(specs, tuple(ModelTensor(*one) for one in named), CHUNK, "int8")


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


def test_chunks_near_the_end_of_a_parameter_hold_whole_blocks():
    for size in range(CHUNK - 40, CHUNK + 41):
        found = int8_layout(size, CHUNK)
        assert [plan.first for plan in found.plans][1:] == [plan.last for plan in found.plans[:-1]]
        assert found.plans[-1].last == size + CHUNK
        for chunk, plan in enumerate(found.plans):
            assert chunk * CHUNK <= plan.first <= chunk * CHUNK + 31
            assert all(piece.start % 32 == 0 for piece in plan.pieces)


def test_a_last_chunk_whose_beginning_moves_to_the_end_does_not_exist():
    """The second chunk would begin in a block of 32 that ends with the parameter."""
    found = int8_layout(10, CHUNK - 4)
    assert found.num_chunks == 1
    assert (found.plans[0].first, found.plans[0].last) == (0, CHUNK + 6)
    assert int8_layout(10, CHUNK + 30).num_chunks == 2


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (2, 3, 4), (4, 1, 2, 3), (1, 1, 9)], ids=str)
def test_boxes_tile_every_range_in_order(shape):
    numbers = np.arange(math.prod(shape)).reshape(shape)
    for start in range(numbers.size):
        for stop in range(start + 1, numbers.size + 1):
            found = []
            for box in cut_range(shape, start, stop):
                found += numbers[box.slices].flatten().tolist()
            assert found == list(range(start, stop))
