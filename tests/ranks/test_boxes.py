"""Boxes of parameters, against torch's own indexing; exhaustive for small shapes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from offload.format import Layout, ModelTensor, ParameterSpec
from offload.format.boxes import Box, Cut

SHAPES = [(), (0,), (1,), (4,), (2, 3), (3, 1), (1, 3), (2, 0), (2, 2, 3), (1, 2, 2)]


def boxes_of(shape: tuple[int, ...]) -> Iterator[Box]:
    """Yield every box within a shape, also the empty ones."""
    ranges = [[(o, s) for o in range(n + 1) for s in range(n - o + 1)] for n in shape]
    for found in itertools.product(*ranges):
        yield Box(tuple(o for o, _ in found), tuple(s for _, s in found))


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor whose elements have their own numbers as values."""
    return torch.arange(int(torch.Size(shape).numel())).reshape(shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_box_is_the_index_that_torch_takes(shape: tuple[int, ...]) -> None:
    whole = numbered(shape)
    for box in boxes_of(shape):
        found = whole[box.slices]
        assert tuple(found.shape) == box.sizes
        assert box.num_elements == found.numel()
        assert box.fits(shape)
        assert box.stops == tuple(o + s for o, s in zip(box.offsets, box.sizes, strict=True))
        elements = found.flatten().tolist()
        is_run = (
            elements == [*range(elements[0], elements[0] + len(elements))] if elements else True
        )
        given = box.contiguous_range(shape)
        assert (given is not None) == is_run
        if given is not None:
            assert whole.flatten()[slice(*given)].tolist() == elements


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 1, 2)], ids=str)
def test_intersections_have_the_elements_of_both(shape: tuple[int, ...]) -> None:
    whole = numbered(shape)
    elements = {box: {*whole[box.slices].flatten().tolist()} for box in boxes_of(shape)}
    for one, other in itertools.product(elements, repeat=2):
        common = one.intersection(other)
        expected = elements[one] & elements[other]
        assert (common is None) == (not expected)
        if common is not None:
            assert elements[common] == expected


def test_boxes_outside_of_a_shape_do_not_fit() -> None:
    assert not Box((2,), (3,)).fits((4,))
    assert not Box((0, 0), (2, 2)).fits((4,))
    assert Box((0,), (4,)).intersection(Box((0, 0), (4, 4))) is None
    with pytest.raises(ValueError, match=r"\[2:5,\] is not within the shape \(4,\)"):
        Cut((4,), Box((2,), (3,)))


@pytest.mark.parametrize(("offsets", "sizes"), [((0,), (1, 2)), ((-1,), (2,)), ((0,), (-2,))])
def test_what_is_no_box_is_refused(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="are no box"):
        Box(offsets, sizes)


def test_notations_are_distinct_within_a_shape_and_from_flat_ranges() -> None:
    for shape in SHAPES:
        boxes = [*boxes_of(shape)]
        assert len({box.notation() for box in boxes}) == len(boxes)
    assert Box((2, 0), (2, 16)).notation() == "[2:4, 0:16]"
    assert Box((2,), (2,)).notation() == "[2:4,]"
    assert Box((), ()).notation() == "[]"


def test_state_files_name_the_box_of_a_parameter() -> None:
    cut = Cut((8, 3), Box((2, 0), (4, 3)))
    whole = ParameterSpec("w", "F32", (4, 3), 0, ("exp_avg",))
    part = ParameterSpec("w", "F32", (4, 3), 0, ("exp_avg",), cut)
    vector = ParameterSpec("v", "F32", (3000,), 0, ("exp_avg",), Cut((9000,), Box((5,), (3000,))))
    assert (whole.stored_name, part.stored_name) == ("w", "w[2:6, 0:3]")
    assert part != whole
    model = (ModelTensor("w", "F32", (4, 3)), ModelTensor("v", "F32", (3000,)))
    layout = Layout((part, vector), model, 1024, shares=(1, 1))
    names = [[*headers["exp_avg"].entries] for headers in layout.array_headers]
    # On two drives the vector is in flat parts, which count from the first element of its box.
    assert names == [
        ["w[2:6, 0:3]", "v[5:3005,][0:1012]", "v[5:3005,][2036:3000]"],
        ["v[5:3005,][1012:2036]"],
    ]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_runs_of_a_box_have_its_elements_in_order(shape: tuple[int, ...]) -> None:
    whole = numbered(shape)
    for box in boxes_of(shape):
        runs = list(box.runs(shape))
        found = [element for start, stop in runs for element in range(start, stop)]
        assert found == whole[box.slices].flatten().tolist()
        assert all(a[1] < b[0] for a, b in itertools.pairwise(runs))  # each is as long as it can be


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_box_counted_from_another_is_the_same_elements(shape: tuple[int, ...]) -> None:
    whole = numbered(shape)
    for box in boxes_of(shape):
        inner = whole[box.slices]
        for number, other in enumerate(boxes_of(shape)):
            common = box.intersection(other)
            if common is not None and number % 3 == 0:
                assert torch.equal(inner[common.within(box).slices], whole[common.slices])
                assert common.within(box).shifted(box.offsets) == common
