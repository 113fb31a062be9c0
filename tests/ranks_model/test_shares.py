"""Division of a model file among ranks: every element has one owner, and a place in the file."""

from __future__ import annotations

import random

import numpy as np
import pytest

from offload.errors import MismatchError
from offload.format.boxes import Box, Cut
from offload.format.header import DTYPE_BYTES, build_header
from offload.format.layout import Layout, ModelTensor, ParameterSpec
from offload.format.shares.box_ranges import flat_boxes, hull, uncovered
from offload.format.shares.model_shares import TensorBox, divide
from tests.ranks_model.cuts import divided, owner_of_bytes, random_tiling, rows

SHAPES = [(7,), (1,), (5, 3), (4, 1, 6), (1, 9), (3, 4, 5), (2, 3, 2, 3), ()]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_flat_ranges_become_boxes_of_the_same_elements_in_their_order(shape):
    numbers = np.arange(int(np.prod(shape))).reshape(shape)
    for start in range(numbers.size):
        for stop in range(start, numbers.size + 1):
            found = list(flat_boxes(shape, start, stop))
            elements = [n for _, box in found for n in numbers[box.slices].reshape(-1)]
            assert elements == list(range(start, stop))
            assert [at for at, _ in found] == [int(numbers[b.slices].min()) for _, b in found]
            assert len(found) <= max(2 * len(shape) - 1, 1)


@pytest.mark.parametrize("seed", range(30))
def test_whatever_has_not_one_owner_is_found(seed):
    """Some boxes of a random tiling are taken out, doubled or shifted."""
    chance = random.Random(seed)
    shape = chance.choice([s for s in SHAPES if s])
    boxes = random_tiling(shape, chance)
    owners = list(enumerate(boxes))
    for _ in range(chance.randrange(3)):
        change = chance.choice(["drop", "double", "shrink"])
        index = chance.randrange(len(owners)) if owners else None
        if index is None:
            break
        if change == "drop":
            owners.pop(index)
        elif change == "double":
            owners.append((99, owners[index][1]))
        else:
            rank, box = owners[index]
            dim = chance.randrange(len(shape))
            sizes = list(box.sizes)
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


def test_what_no_rank_lists_is_the_writers():
    shares = divide(HEADER, [*divided({"a": (6, 5), "w": (4, 3, 2)}, 3)], writer=2)
    assert not shares.needs_shard_files
    assert [one.name for one in shares.boxes[0]] == ["a", "w"]
    assert [one.name for one in shares.boxes[2]] == ["a", "s", "buffer"], "its rows of w are none"
    assert shares.boxes[2][1].box == Box((), ())


@pytest.mark.parametrize(
    ("owned", "message"),
    [
        ([[("a", Box((0, 0), (3, 5)))], []], r"no rank writes \[3:6, 0:5\] of 'a' with shape \[6"),
        ([[("a", Box((0, 0), (4, 5)))], [("a", Box((3, 0), (3, 5)))]],
         r"ranks 0, 1 all write \[3:4, 0:5\] of 'a'"),
        ([[("w", Box.whole((4, 3, 2)))], [("w", Box.whole((4, 3, 2)))]], "only one rank may list"),
        ([[], [("b", Box((0,), (1,)))]], "rank 1 writes 'b', which is not among"),
        ([[], [("a", Box((5, 0), (2, 5)))]], r"rank 1 writes \[5:7, 0:5\] of 'a', whose shape is"),
        ([[("a", Box((0,), (6,)))], []], "whose shape is"),
        ([[("a", Box((0, 0), (0, 5)))], []], r"no rank writes \[0:6, 0:5\] of 'a'"),
    ],
    ids=["gap", "overlap", "replica", "name", "beyond", "dimensions", "empty"],
)  # fmt: skip
def test_gaps_and_overlaps_are_refused_by_name(owned, message):
    with pytest.raises(MismatchError, match=message):
        divide(HEADER, [[TensorBox(*one) for one in boxes] for boxes in owned])


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("piece_bytes", [8, 24, 4096])
def test_places_in_the_file_are_those_of_the_elements(seed, piece_bytes):
    chance = random.Random(seed)
    shapes = {"a": (6, 5), "s": (), "w": (4, 3, 2), "buffer": (11,)}
    owned = [[] for _ in range(3)]
    for name, shape in shapes.items():
        tiling = random_tiling(shape, chance) if name != "s" else [Box((), ())]
        if any(box.contiguous_range(shape) is None for box in tiling):
            tiling = rows(shape, 3)
        for box in tiling:
            owned[chance.randrange(3)].append(TensorBox(name, box))
    for boxes in owned:
        chance.shuffle(boxes)
    shares = divide(HEADER, owned, piece_bytes=piece_bytes)
    owners = owner_of_bytes(HEADER, owned)
    for rank in range(3):
        share = shares.share(rank)
        assert share.nbytes == int((owners == rank).sum())
        places = [n for piece in share.pieces for n in range(piece.start, piece.stop)]
        assert places == np.flatnonzero(owners == rank).tolist(), "in ascending order, each once"
        assert all(0 < piece.nbytes <= piece_bytes for piece in share.pieces)
        at = 0
        for piece in share.pieces:
            entry = share.entries[piece.entry]
            assert piece.position == at
            assert piece.start == entry.start + piece.number * piece_bytes
            assert piece.stop <= entry.start + entry.nbytes
            at += piece.nbytes


def test_digests_of_boxes_are_bound_to_names_that_cannot_be_confused():
    header = build_header([("a[0:1,]", "F32", (2,)), ("a", "F32", (2,))])
    boxes = [[TensorBox(n, Box((i,), (1,))) for n in ("a", "a[0:1,]")] for i in range(2)]
    shares = divide(header, boxes)
    names = [e.digest_array for rank in range(2) for e in shares.share(rank).entries]
    assert len(set(names)) == 4
    assert "model/a[0:1,][0:1,]" in names


def test_a_cut_in_another_dimension_needs_shard_files():
    owned = divided({"a": (6, 5)}, 2, {"a": 1})
    shares = divide(HEADER, owned)
    assert shares.needs_shard_files
    with pytest.raises(MismatchError, match=r"\[0:6, 0:3\] of 'a' .* write shard files"):
        shares.share(1)


def test_a_step_waits_for_the_boxes_of_its_chunk_and_no_others():
    shapes = {"a": (64, 64), "w": (64, 32)}
    header = build_header([("a", "F32", shapes["a"]), ("w", "BF16", shapes["w"])])
    boxes = divided(shapes, 2)
    share = divide(header, boxes).share(1)
    specs = tuple(
        ParameterSpec(name, dtype, box.sizes, 0, ("exp_avg",), Cut(shapes[name], box))
        for name, dtype, box in [
            ("a", "F32", boxes[1][0].box),
            ("w", "BF16", boxes[1][1].box),
        ]
    )
    model = (ModelTensor("a", "F32", shapes["a"]), ModelTensor("w", "BF16", shapes["w"]))
    layout = Layout(specs, model, 1024)
    first, both = 32 * 64 * 4, 32 * 64 * 4 + 32 * 32 * 2
    assert share.positions == (0, first, both)
    assert share.model_stops(layout) == (first, first, both)
    assert share.stop_of("w") == both
    assert share.stop_of("a", Box((0, 0), (32, 64))) == 0, "another rank's rows"
    assert share.stop_of("a", Box((31, 0), (2, 1))) == first
    assert share.stop_of("nothing") == 0


@pytest.mark.parametrize("seed", range(20))
def test_pieces_with_wanted_elements_are_found(seed):
    chance = random.Random(seed)
    header = build_header([("a", "F32", (6, 5)), ("w", "BF16", (4, 3, 2))])
    owned = [[TensorBox(n, b) for n, s in (("a", (6, 5)), ("w", (4, 3, 2))) for b in rows(s, 1)]]
    share = divide(header, owned, piece_bytes=8).share(0)
    wanted = [
        TensorBox(name, box)
        for name, shape in (("a", (6, 5)), ("w", (4, 3, 2)))
        for box in random_tiling(shape, chance)
        if chance.random() < 0.3
    ]
    needed = np.zeros(header.file_bytes, dtype=bool)
    hulls = np.zeros(header.file_bytes, dtype=bool)
    for one in wanted:
        entry = header.entries[one.name]
        size = DTYPE_BYTES[entry.dtype]
        mask = np.zeros(entry.shape, dtype=bool)
        mask[one.box.slices] = True
        at = np.flatnonzero(np.repeat(mask.reshape(-1), size)) + header.data_start + entry.start
        needed[at] = True
        first, last = hull(Box.whole(entry.shape), one.box)
        assert (first * size, last * size) == tuple(
            n - header.data_start - entry.start for n in (at[0], at[-1] + 1)
        )
        hulls[at[0] : at[-1] + 1] = True
    found = share.pieces_with(wanted)
    read = np.zeros(header.file_bytes, dtype=bool)
    for number in found:
        piece = share.pieces[number]
        read[piece.start : piece.stop] = True
    assert not (needed & ~read).any()
    assert list(found) == sorted(set(found))
    for name in ("a", "w"):  # nothing beyond the range from the first to the last wanted element
        entry = header.entries[name]
        span = slice(header.data_start + entry.start, header.data_start + entry.stop)
        inside = np.flatnonzero(hulls[span])
        if not len(inside):
            assert not read[span].any()
        else:
            low, high = inside[0] // 8 * 8, -(-(inside[-1] + 1) // 8) * 8
            assert not read[span][:low].any()
            assert not read[span][high:].any()
