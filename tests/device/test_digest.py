"""Digests of leaves by the kernels' arithmetic, against the xxhash library."""

from __future__ import annotations

import torch
import xxhash

from offload.device.kernels import digest
from offload.format.digests import LEAF_BYTES, DigestContext, leaf_digests

# Where formulas change: short inputs, stripes of 64, blocks of 1024.
SHORT = list(range(1, 300))
LONG = [511, 512, 513, 960, 961, 1023, 1024, 1025, 1087, 1088, 1089, 2047, 2048, 2049, 65_537]
LEAVES = [
    LEAF_BYTES - 1,
    LEAF_BYTES,
    LEAF_BYTES + 1,
    LEAF_BYTES + 240,
    LEAF_BYTES + 241,
    2 * LEAF_BYTES,
    3 * LEAF_BYTES - 64,
]


def content(num_bytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)


def test_leaves_of_every_short_length(digests):
    data = content(max(SHORT))
    wrong = [
        n for n in SHORT
        if digests.leaf_digests(data[:n].clone())
        != xxhash.xxh3_64_intdigest(data[:n].numpy().tobytes()).to_bytes(8, "little")
    ]  # fmt: skip
    assert wrong == []


def test_leaves_of_any_length_and_alignment(digests):
    tensors = [content(num_bytes, num_bytes) for num_bytes in LONG + LEAVES]
    tensors += [content(LEAF_BYTES + 5000)[offset:] for offset in range(1, 8)]
    tensors += [torch.full((LEAF_BYTES + 777,), v, dtype=torch.uint8) for v in (0, 255)]
    for data in tensors:
        expected = leaf_digests(memoryview(data.numpy()))
        assert len(expected) == 8 * digest.num_leaves(data.nbytes)
        assert digests.leaf_digests(data) == expected, data.nbytes


def test_the_digest_of_a_chunk_is_made_of_the_leaves_on_the_host(digests):
    data = torch.randn(400_000)
    context = DigestContext("0123", 7)
    expected = context.digest("exp_avg", 3, memoryview(data.numpy()).cast("B"))
    assert context.digest_leaves("exp_avg", 3, digests.leaf_digests(data)) == expected
