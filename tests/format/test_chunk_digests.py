"""Digests of a chunk: the same however its bytes are reported, and no leaf is digested twice."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import xxhash

from offload.format.digests import LEAF_BYTES, ChunkDigests, DigestContext, leaf_digest, one_by_one

CONTEXT = DigestContext("0123456789abcdef" * 2, 7)
CHUNK = 3
NBYTES = 3 * LEAF_BYTES + 1000
"""Three whole leaves and a short one."""

WHOLE = [
    (0, LEAF_BYTES),
    (LEAF_BYTES, 2 * LEAF_BYTES),
    (2 * LEAF_BYTES, 3 * LEAF_BYTES),
    (3 * LEAF_BYTES, NBYTES),
]
REPORTS = {
    "leaf-by-leaf": WHOLE,
    "all-at-once": [(0, NBYTES)],
    "last-leaf-first": WHOLE[::-1],
    "several-leaves": [(0, 2 * LEAF_BYTES), (2 * LEAF_BYTES, NBYTES)],
    "pieces-of-leaves": [(at, min(at + 300_001, NBYTES)) for at in range(0, NBYTES, 300_001)],
    "as-long-as-a-leaf-but-across-two": [
        (0, 100),
        (100, 100 + LEAF_BYTES),
        (100 + LEAF_BYTES, NBYTES),
    ],
    "from-within-a-leaf-to-its-end": [
        (100, LEAF_BYTES),
        (LEAF_BYTES + 7, NBYTES),
        (0, 100),
        (LEAF_BYTES, LEAF_BYTES + 7),
    ],
    "empty-ranges-between": [
        (LEAF_BYTES, LEAF_BYTES),
        *WHOLE[:2],
        (2 * LEAF_BYTES, 2 * LEAF_BYTES),
        *WHOLE[2:],
        (NBYTES, NBYTES),
        (LEAF_BYTES, LEAF_BYTES),
    ],
}


def chunk() -> bytearray:
    return bytearray(random.Random(1).randbytes(NBYTES))


class Counting:
    """Runs that compute one item after the other, with the number of items of each."""

    def __init__(self) -> None:
        self.runs: list[int] = []

    def __call__(
        self, function: Callable[[memoryview], bytes], items: Sequence[memoryview]
    ) -> list[bytes]:
        self.runs.append(len(items))
        return one_by_one(function, items)


def test_a_digest_is_of_the_leaves_and_of_what_they_are() -> None:
    data = chunk()
    leaves = b"".join(
        xxhash.xxh3_64_intdigest(bytes(data[start:stop])).to_bytes(8, "little")
        for start, stop in WHOLE
    )
    context = f"{CONTEXT.store_id}/7/exp_avg/3".encode()
    expected = xxhash.xxh3_64_hexdigest(leaves + context)
    assert CONTEXT.digest("exp_avg", CHUNK, memoryview(data)) == expected


@pytest.mark.parametrize("reports", REPORTS.values(), ids=REPORTS)
def test_bytes_that_are_reported_in_any_pieces_are_digested_once(
    reports: Sequence[tuple[int, int]],
) -> None:
    data = chunk()
    digests = ChunkDigests({"master": memoryview(data), "exp_avg": memoryview(data)})
    for start, stop in reports:
        digests.written("exp_avg", start, stop)
    for start, stop in WHOLE:
        digests.written("master", start, stop)
    counting = Counting()
    found = digests.finish(CONTEXT, CHUNK, counting)
    assert found == {
        name: CONTEXT.digest(name, CHUNK, memoryview(data)) for name in ("master", "exp_avg")
    }
    assert counting.runs == []  # all leaves had been digested


def test_what_is_not_reported_is_digested_at_the_end() -> None:
    """Bytes that nobody has reported may still change, beside reported ones of the same leaf."""
    data = chunk()
    digests = ChunkDigests({"exp_avg": memoryview(data)})
    digests.written("exp_avg", 0, LEAF_BYTES)
    digests.written("exp_avg", LEAF_BYTES + 100, 3 * LEAF_BYTES + 10)
    data[LEAF_BYTES : LEAF_BYTES + 100] = bytes(100)
    data[3 * LEAF_BYTES + 10 :] = bytes(990)
    counting = Counting()
    found = digests.finish(CONTEXT, CHUNK, counting)
    assert found == {"exp_avg": CONTEXT.digest("exp_avg", CHUNK, memoryview(data))}
    assert counting.runs == [2]


def test_a_leaf_whose_digest_is_reported_is_not_digested_again() -> None:
    data = chunk()
    digests = ChunkDigests({"exp_avg": memoryview(data)})
    for number, (start, stop) in enumerate(WHOLE[:3]):
        digests.digested("exp_avg", number, leaf_digest(memoryview(data)[start:stop]))
    counting = Counting()
    found = digests.finish(CONTEXT, CHUNK, counting)
    assert found == {"exp_avg": CONTEXT.digest("exp_avg", CHUNK, memoryview(data))}
    assert counting.runs == [1]
