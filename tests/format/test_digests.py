"""Digests: as the page says, however the bytes of a leaf are cut, reported or arrive."""

import random

import pytest
import xxhash

from offload.format import ChunkDigests, DigestContext
from offload.format.digests import LEAF_BYTES, LeafStream, leaf_digests, one_by_one

CONTEXT = DigestContext("0123456789abcdef" * 2, 7)
CHUNK = 3
NBYTES = 3 * LEAF_BYTES + 1000
"""Three whole leaves and a short one."""

WHOLE = [(at, min(at + LEAF_BYTES, NBYTES)) for at in range(0, NBYTES, LEAF_BYTES)]
REPORTS = {
    "all-at-once": [(0, NBYTES)],
    "last-leaf-first": WHOLE[::-1],
    "pieces-of-leaves": [(at, min(at + 300_001, NBYTES)) for at in range(0, NBYTES, 300_001)],
    "as-long-as-a-leaf-but-across-two": [
        (0, 100),
        (100, 100 + LEAF_BYTES),
        (100 + LEAF_BYTES, NBYTES),
    ],
    "out-of-order-within-leaves": [
        (100, LEAF_BYTES),
        (LEAF_BYTES + 7, NBYTES),
        (0, 100),
        (LEAF_BYTES, LEAF_BYTES + 7),
    ],
    "empty-ranges-between": [(LEAF_BYTES, LEAF_BYTES), *WHOLE, (NBYTES, NBYTES)],
}


def expected_leaves(data):
    return b"".join(
        xxhash.xxh3_64_intdigest(bytes(data[start : start + LEAF_BYTES])).to_bytes(8, "little")
        for start in range(0, len(data), LEAF_BYTES)
    )


def expected_digest(data):
    context = f"{CONTEXT.store_id}/7/exp_avg/{CHUNK}".encode()
    return xxhash.xxh3_64_hexdigest(expected_leaves(data) + context)


@pytest.mark.parametrize("reports", REPORTS.values(), ids=REPORTS)
def test_bytes_that_are_reported_in_any_pieces_are_digested(reports):
    data = bytearray(random.Random(1).randbytes(NBYTES))
    assert CONTEXT.digest("exp_avg", CHUNK, memoryview(data)) == expected_digest(data)
    digests = ChunkDigests({"exp_avg": memoryview(data)})
    for start, stop in reports:
        digests.written("exp_avg", start, stop)
    left = []
    found = digests.finish(
        CONTEXT, CHUNK, lambda f, items: left.extend(items) or one_by_one(f, items)
    )
    assert found == {"exp_avg": expected_digest(data)}
    assert left == [], "no leaf is digested twice"


def test_what_is_not_reported_is_digested_at_the_end():
    """Bytes that nobody has reported may still change, beside reported ones of the same leaf."""
    data = bytearray(random.Random(1).randbytes(NBYTES))
    digests = ChunkDigests({"exp_avg": memoryview(data)})
    digests.written("exp_avg", 0, LEAF_BYTES)
    digests.written("exp_avg", LEAF_BYTES + 100, 3 * LEAF_BYTES + 10)
    data[LEAF_BYTES : LEAF_BYTES + 100] = bytes(100)
    data[3 * LEAF_BYTES + 10 :] = bytes(990)
    assert digests.finish(CONTEXT, CHUNK, one_by_one) == {"exp_avg": expected_digest(data)}


@pytest.mark.parametrize("nbytes", [0, 1, LEAF_BYTES - 1, LEAF_BYTES + 1, 3 * LEAF_BYTES + 7])
def test_leaves_do_not_depend_on_the_pieces_that_bytes_arrive_in(nbytes):
    draw = random.Random(nbytes)
    data = draw.randbytes(nbytes)
    assert leaf_digests(memoryview(data)) == expected_leaves(data)
    leaves = LeafStream()
    for most in (400_000, 3 << 20):  # the second time, it begins anew
        start = 0
        while start < nbytes:
            piece = bytearray(data[start : start + draw.randrange(1, most)])
            start += len(piece)
            leaves.update(memoryview(piece))
            piece[:] = bytes(len(piece))  # its memory is used for something else
        assert leaves.finish() == expected_leaves(data)
