"""Batches and blocks: who writes which block, and what goes through the page cache."""

from __future__ import annotations

import random

import numpy as np
import pytest

from gds import ALIGNMENT
from offload.format.header import DTYPE_BYTES, build_header
from offload.format.shares.model_blocks import SharePlan, capacity_for, cut_batches, writes_of
from offload.format.shares.model_shares import ModelShares, divide
from tests.ranks_model.cuts import divided, owner_of_bytes

DTYPES = ["F32", "BF16", "U8"]


def some_model(seed: int, piece_bytes: int) -> tuple[ModelShares, np.ndarray]:
    """Divide random tensors, with rows from 2 bytes to 4,094 and more, among three ranks."""
    chance = random.Random(seed)
    tensors = []
    for number in range(chance.randrange(1, 12)):
        dtype = chance.choice(DTYPES)
        width = chance.choice([1, 2, 3, 511, 1023, 2047, 4094, 5000]) // DTYPE_BYTES[dtype] + 1
        tensors.append((f"t{number}", dtype, (chance.randrange(1, 9), width)))
    tensors.sort(key=lambda t: -DTYPE_BYTES[t[1]])
    header = build_header(tensors, header_bytes=chance.choice([None, 4096 + 8, 8192 - 8]))
    listed = {name: shape for name, _, shape in tensors if chance.random() < 0.9}
    owned = divided(listed, 3)
    return divide(header, owned, piece_bytes=piece_bytes), owner_of_bytes(header, owned)


@pytest.mark.parametrize("piece_bytes", [64, 1000, 4096, 5000, 8192, 1 << 20])
@pytest.mark.parametrize("seed", range(8))
def test_every_byte_is_written_by_its_owner_and_shared_blocks_byte_by_byte(seed, piece_bytes):
    shares, owners = some_model(seed, piece_bytes)
    size = len(owners)
    written = np.zeros(size, dtype=int)
    for rank in range(3):
        plan = SharePlan(shares.share(rank))
        capacity = capacity_for(piece_bytes)
        memory, end = np.full(capacity, -1, dtype=np.int64), 0
        for batch in plan.batches:
            assert batch.nbytes <= capacity
            previous, memory = memory, np.full(capacity, -1, dtype=np.int64)
            for number, segment in enumerate(batch.segments):
                assert segment.at % ALIGNMENT == segment.start % ALIGNMENT
                place = slice(segment.at, segment.at + segment.nbytes)
                assert (memory[place] == -1).all(), "segments apart in memory"
                memory[place] = np.arange(segment.start, segment.stop)
                if segment.carried:
                    assert number == 0
                    place = slice(segment.at - segment.carried, segment.at)
                    memory[place] = previous[end - segment.carried : end]
                end = segment.at + segment.nbytes
                wanted = writes_of(segment, [(0, size)])
                for start, stop in wanted.blocks:
                    assert start % ALIGNMENT == stop % ALIGNMENT == 0
                    assert (owners[start:stop] == rank).all(), "a shared block"
                for start, stop in wanted.edges:
                    assert stop - start < ALIGNMENT
                    assert start // ALIGNMENT == (stop - 1) // ALIGNMENT
                    block = owners[start // ALIGNMENT * ALIGNMENT :][:ALIGNMENT]
                    assert len(block) < ALIGNMENT or (block != rank).any(), "a block of its own"
                for start, stop in (*wanted.blocks, *wanted.edges):
                    at = segment.at + start - segment.start
                    assert memory[at : at + stop - start].tolist() == list(range(start, stop))
                    assert (owners[start:stop] == rank).all()
                    written[start:stop] += 1
            for placed in batch.pieces:
                piece = plan.share.pieces[placed.index]
                held = memory[placed.at : placed.at + piece.nbytes]
                assert held.tolist() == list(range(piece.start, piece.stop)), "whole"
        numbers = [placed.index for batch in plan.batches for placed in batch.pieces]
        assert numbers == list(range(len(plan.share.pieces)))
        if plan.batches:
            assert plan.batches[-1].position == plan.share.nbytes
    assert (written == (owners >= 0)).all(), "each byte of the data once"


@pytest.mark.parametrize("seed", range(12))
def test_what_has_changed_is_written_in_whole_blocks_and_nothing_else(seed):
    shares, owners = some_model(seed, 5000)
    chance = random.Random(seed)
    for rank in range(3):
        for batch in SharePlan(shares.share(rank)).batches:
            for segment in batch.segments:
                first, last = segment.written
                edges = sorted(chance.randrange(segment.stop + 9) for _ in range(4))
                changed = [(a, b) for a, b in (edges[:2], edges[2:]) if a < b]
                if len(changed) == 2 and changed[0][1] == changed[1][0]:
                    changed = [(changed[0][0], changed[1][1])]
                found = writes_of(segment, changed)
                whole = writes_of(segment, [(0, len(owners))])
                assert set(found.edges) <= set(whole.edges)
                written = np.zeros(len(owners) + ALIGNMENT, dtype=int)
                for start, stop in (*found.blocks, *found.edges):
                    assert first <= start < stop <= last
                    written[start:stop] += 1
                    for block in range(start // ALIGNMENT, -(-stop // ALIGNMENT)):
                        low, high = block * ALIGNMENT, (block + 1) * ALIGNMENT
                        assert any(a < high and low < b for a, b in changed), "for nothing"
                assert written.max() <= 1
                for start, stop in changed:
                    low, high = max(start, first), min(stop, last)
                    assert low >= high or (written[low:high] == 1).all()


def test_pieces_of_a_model_of_many_small_tensors_share_batches():
    header = build_header([(f"n{i}", "BF16", (7,)) for i in range(3000)])
    plan = SharePlan(divide(header, [[]]).share(0))
    assert len(plan.batches) == 1
    assert len(plan.batches[0].segments) == 1, "they adjoin each other"
    assert plan.buffer_bytes == 45056


def test_a_rank_that_writes_nothing_has_no_batches():
    header = build_header([("a", "F32", (4,))])
    plan = SharePlan(divide(header, [[], []]).share(1))
    assert plan.batches == ()
    assert plan.share.nbytes == 0
    assert plan.buffer_bytes == ALIGNMENT
    assert cut_batches([], 8192) == ()
