"""Digests of leaves: the same for bytes that are there at once and for bytes that arrive."""

from __future__ import annotations

import random

import pytest
import xxhash

from offload.format.digests import LEAF_BYTES, LeafStream, leaf_digests

SIZES = [0, 1, LEAF_BYTES - 1, LEAF_BYTES, LEAF_BYTES + 1, 3 * LEAF_BYTES, 3 * LEAF_BYTES + 7]


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("most", [400_000, 3 << 20], ids=["parts-of-leaves", "several-leaves"])
def test_leaves_do_not_depend_on_the_pieces_that_bytes_arrive_in(nbytes: int, most: int) -> None:
    rng = random.Random(nbytes + most)
    data = rng.randbytes(nbytes)
    expected = b"".join(
        xxhash.xxh3_64_intdigest(data[start : start + LEAF_BYTES]).to_bytes(8, "little")
        for start in range(0, nbytes, LEAF_BYTES)
    )
    assert leaf_digests(memoryview(data)) == expected
    leaves = LeafStream()
    for _ in range(2):  # the second time, it begins anew
        start = 0
        while start < nbytes:
            end = start + rng.randrange(1, most)
            piece = bytearray(data[start:end])
            leaves.update(memoryview(piece))
            piece[:] = bytes(len(piece))  # its memory is used for something else
            start = end
        assert leaves.finish() == expected
