"""Division of a model file among ranks: every element has one owner, and a place in the file."""

from __future__ import annotations

import random

import numpy as np
import pytest

from offload.errors import MismatchError
from offload.format.boxes import Box, Cut, uncovered
from offload.format.header import build_header
from offload.format.layout import Layout, ModelTensor, ParameterSpec
from offload.format.shares.model_shares import TensorBox, divide, file_share, model_shard
from tests.ranks_model.cuts import divided, owner_of_bytes, random_tiling, rows

SHAPES = [(7,), (1,), (5, 3), (4, 1, 6), (1, 9), (3, 4, 5), (2, 3, 2, 3)]


@pytest.mark.parametrize("seed", range(10))
def test_whatever_has_not_one_owner_is_found(seed: int) -> None:
    """Some boxes of a random tiling are taken out, doubled or made smaller."""
    chance = random.Random(seed)
    shape = chance.choice(SHAPES)
    owners = list(enumerate(random_tiling(shape, chance)))
    for change in chance.choices(["drop", "double", "shrink"], k=chance.randrange(3)):
        if not owners:
            break
        index = chance.randrange(len(owners))
        rank, box = owners[index]
        if change == "drop":
            owners.pop(index)
        elif change == "double":
            owners.append((99, box))
        else:
            sizes = list(box.sizes)
            dim = chance.randrange(len(shape))
            sizes[dim] = max(1, sizes[dim] - 1)
            owners[index] = rank, Box(box.offsets, tuple(sizes))
    counts = np.zeros(shape, dtype=int)
    for _, box in owners:
        counts[box.slices] += 1
    found = np.ones(shape, dtype=int)
    for box, ranks in uncovered(shape, owners):
        assert (found[box.slices] == 1).all(), "said twice"
        assert (counts[box.slices] == len(ranks)).all()
        held = [rank for rank, one in owners if one.intersection(box)]
        assert sorted(held) == list(ranks)
        found[box.slices] = len(ranks)
    assert (found == counts).all()


HEADER = build_header(
    [("a", "F32", (6, 5)), ("s", "F32", ()), ("e", "F32", (0, 4)), ("w", "BF16", (4, 3, 2)),
     ("buffer", "I8", (11,))]
)  # fmt: skip


def test_gaps_and_overlaps_are_refused_by_name() -> None:
    whole = Box.whole((4, 3, 2))
    for owned, message in (
        ([[("a", Box((0, 0), (3, 5)))], []], r"no rank writes \[3:6, 0:5\] of 'a' with shape \[6"),
        ([[("a", Box((0, 0), (4, 5)))], [("a", Box((3, 0), (3, 5)))]],
         r"ranks 0, 1 all write \[3:4, 0:5\] of 'a'"),
        ([[("w", whole)], [("w", whole)]], "only one rank may list"),
        ([[], [("b", Box((0,), (1,)))]], "rank 1 writes 'b', which is not among"),
        ([[], [("a", Box((5, 0), (2, 5)))]], r"rank 1 writes \[5:7, 0:5\] of 'a', whose shape is"),
        ([[("a", Box((0,), (6,)))], []], "whose shape is"),
        ([[("a", Box((0, 0), (0, 5)))], []], r"no rank writes \[0:6, 0:5\] of 'a'"),
    ):  # fmt: skip
        with pytest.raises(MismatchError, match=message):
            divide(HEADER, [[TensorBox(*one) for one in boxes] for boxes in owned])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("piece_bytes", [8, 24, 4096])
def test_places_in_the_file_are_those_of_the_elements(seed: int, piece_bytes: int) -> None:
    chance = random.Random(seed)
    owned: list[list[TensorBox]] = [[] for _ in range(3)]
    for name, shape in {"a": (6, 5), "s": (), "w": (4, 3, 2), "buffer": (11,)}.items():
        tiling = random_tiling(shape, chance) if name != "s" else [Box((), ())]
        if any(box.contiguous_range(shape) is None for box in tiling):
            tiling = rows(shape, 3)
        for box in tiling:
            owned[chance.randrange(3)].append(TensorBox(name, box))
    for boxes in owned:
        chance.shuffle(boxes)
    shares = divide(HEADER, owned, piece_bytes=piece_bytes)
    owners = owner_of_bytes(shares)
    for rank in range(3):
        share = shares.share(rank)
        assert share.nbytes == int((owners == rank).sum())
        places = [n for piece in share.pieces for n in range(piece.start, piece.stop)]
        assert places == np.flatnonzero(owners == rank).tolist(), "in ascending order, each once"
        assert all(0 < piece.nbytes <= piece_bytes for piece in share.pieces)


def test_digests_of_boxes_are_bound_to_names_that_cannot_be_confused() -> None:
    header = build_header([("a[0:1,]", "F32", (2,)), ("a", "F32", (2,))])
    boxes = [[TensorBox(n, Box((i,), (1,))) for n in ("a", "a[0:1,]")] for i in range(2)]
    shares = divide(header, boxes)
    names = [e.digest_array for rank in range(2) for e in shares.share(rank).entries]
    assert len(set(names)) == 4
    assert "model/a[0:1,][0:1,]" in names


def test_a_shard_file_has_one_box_of_a_tensor() -> None:
    first, other, last = rows((6, 5), 3, 1)
    owned = [[TensorBox("a", first), TensorBox("a", last)], [TensorBox("a", other)]]
    with pytest.raises(MismatchError, match=r"rank 0 writes several boxes of 'a'"):
        model_shard(divide(HEADER, owned), 0, 0)


@pytest.mark.parametrize("num_ranks", [2, 3, 7])
def test_columns_are_copied_into_a_common_file_once_and_have_one_digest(num_ranks: int) -> None:
    """A tensor may change when all of it that the rank owns has been copied, and not before."""
    shapes = {"a": (5, 2 * num_ranks), "b": (num_ranks, 3), "c": (2,)}
    header = build_header([("a", "F32", shapes["a"]), ("b", "BF16", shapes["b"]),
                           ("c", "F32", shapes["c"])])  # fmt: skip
    shares = divide(header, divided({"a": shapes["a"], "b": shapes["b"]}, num_ranks, {"a": 1}))
    copied, digested = np.zeros(header.file_bytes, int), np.zeros(header.file_bytes, int)
    for rank in range(num_ranks):
        share = file_share(shares, rank)
        for entry in share.copied.entries:
            copied[entry.start : entry.start + entry.nbytes] += 1
        for one in share.scattered.entries:
            for at, start, stop in one.runs(0, one.nbytes):
                copied[at : at + stop - start] += 1
        for piece in share.digested.pieces:
            digested[piece.start : piece.stop] += 1
        assert share.stop_of("a") == share.nbytes
        assert share.stop_of("a", rows(shapes["a"], num_ranks, 1)[rank - 1]) == 0
        assert share.stop_of("b") == share.copied.stop_of("b") <= share.copied.nbytes
    for counts in (copied, digested):
        assert not counts[: header.data_start].any()
        assert (counts[header.data_start :] == 1).all()


def test_a_step_waits_for_the_boxes_of_its_chunk_and_no_others() -> None:
    shapes = {"a": (64, 64), "w": (64, 32)}
    header = build_header([("a", "F32", shapes["a"]), ("w", "BF16", shapes["w"])])
    boxes = divided(shapes, 2)
    share = file_share(divide(header, boxes), 1)
    specs = tuple(
        ParameterSpec(
            one.name, dtype, one.box.sizes, 0, ("exp_avg",), Cut(shapes[one.name], one.box)
        )
        for one, dtype in zip(boxes[1], ("F32", "BF16"), strict=True)
    )
    model = (ModelTensor("a", "F32", shapes["a"]), ModelTensor("w", "BF16", shapes["w"]))
    first, both = 32 * 64 * 4, 32 * 64 * 4 + 32 * 32 * 2
    assert share.model_stops(Layout(specs, model, 1024)) == (first, first, both)
    assert share.stop_of("w") == both
    assert share.stop_of("a", Box((0, 0), (32, 64))) == 0, "another rank's rows"
    assert share.stop_of("a", Box((31, 0), (2, 1))) == first
    assert share.stop_of("nothing") == 0
