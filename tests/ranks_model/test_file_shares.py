"""Scattered boxes: their runs in the file, and the rows whose digests each rank has."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from offload.format.boxes import Box, Cut
from offload.format.header import build_header
from offload.format.shares.file_shares import FileShare, ScatteredBox, file_share
from offload.format.shares.model_shares import ModelShares, TensorBox, divide

SHAPE = (6, 4, 5)
BOXES = [
    Box((0, 0, 0), (6, 2, 5)),
    Box((1, 1, 2), (3, 2, 2)),
    Box((0, 0, 4), (6, 4, 1)),
    Box((2, 0, 0), (2, 4, 5)),
]


@pytest.mark.parametrize("box", BOXES, ids=Box.notation)
def test_runs_are_where_numpy_finds_the_elements(box: Box) -> None:
    places = 100 + 4 * np.arange(np.prod(SHAPE)).reshape(SHAPE)
    expected = (places[box.slices].reshape(-1, 1) + np.arange(4)).reshape(-1)
    one = ScatteredBox("x", "F32", Cut(SHAPE, box), 100)
    assert one.nbytes == len(expected)
    for first, last in itertools.combinations(range(0, one.nbytes + 1, 7), 2):
        found: list[int] = []
        for at, start, stop in one.runs(first, last):
            assert start == first + len(found), "runs are in the order of the box's bytes"
            found += range(at, at + stop - start)
        assert found == expected[first:last].tolist()


def shares_of(num_ranks: int) -> ModelShares:
    """Return a model of which one tensor is cut in dimension 1, one in dimension 0, one whole."""
    header = build_header([("a", "F32", (5, 2 * num_ranks)), ("b", "BF16", (num_ranks, 3)),
                           ("c", "F32", (2,))])  # fmt: skip
    boxes: list[Sequence[TensorBox]] = [
        [
            TensorBox("a", Box((0, 2 * rank), (5, 2))),
            TensorBox("b", Box((rank, 0), (1, 3))),
        ]
        for rank in range(num_ranks)
    ]
    return divide(header, boxes, writer=0)


@pytest.mark.parametrize("num_ranks", [2, 3, 7])
def test_every_byte_is_copied_once_and_has_one_digest(num_ranks: int) -> None:
    shares = shares_of(num_ranks)
    size = shares.header.file_bytes
    copied, digested = np.zeros(size, int), np.zeros(size, int)
    for rank in range(num_ranks):
        share = file_share(shares, rank)
        assert share.through_cache
        for entry in share.copied.entries:
            copied[entry.start : entry.start + entry.nbytes] += 1
        for one in share.scattered:
            for at, start, stop in one.runs(0, one.nbytes):
                copied[at : at + stop - start] += 1
        for piece in share.digested.pieces:
            digested[piece.start : piece.stop] += 1
    for counts in (copied, digested):
        assert not counts[: shares.header.data_start].any()
        assert (counts[shares.header.data_start :] == 1).all()


def test_a_scattered_tensor_may_change_when_its_own_box_has_been_copied() -> None:
    share = file_share(shares_of(2), 0)
    (scattered,) = share.scattered
    assert share.nbytes == share.copied.nbytes + scattered.nbytes
    assert share.stop_of("a") == share.nbytes
    assert share.stop_of("a", Box((0, 2), (5, 2))) == 0, "the box of the other rank"
    assert share.stop_of("b") == share.copied.stop_of("b") <= share.copied.nbytes


def test_a_model_without_scattered_boxes_is_shared_as_before() -> None:
    header = build_header([("b", "BF16", (4, 3))])
    boxes = [[TensorBox("b", Box((2 * rank, 0), (2, 3)))] for rank in range(2)]
    shares = divide(header, boxes, writer=0)
    assert file_share(shares, 1) == FileShare(shares.share(1))
