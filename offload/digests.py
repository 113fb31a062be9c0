"""Content digests that a CPU computes at memory speed and a GPU could compute in parallel.

A digest is xxh3_64 over the little-endian xxh3_64 digests of 1 MiB leaves, followed by a context
that says which bytes these ought to be: store, generation, array and chunk. A chunk that is stale,
swapped or misplaced therefore fails as surely as one with a flipped bit. It detects accidents, not
forgery: xxh3 is not a cryptographic hash.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import xxhash

LEAF_BYTES = 1 << 20
"""Bytes of one leaf; the last one of a chunk may be shorter."""

Run: TypeAlias = Callable[[Callable[[memoryview], bytes], Sequence[memoryview]], list[bytes]]
"""Calls a function for every item, perhaps on several threads; returns the results in order."""

_SPAN_BYTES = 8 * LEAF_BYTES
"""What one thread digests at a time: a millisecond or so."""


@dataclass(frozen=True, slots=True)
class DigestContext:
    """Which store and which generation of its state a digest speaks for."""

    store_id: str
    generation: int

    def digest(self, array: str, chunk: int, data: memoryview) -> str:
        """Return the digest of one chunk as 16 hexadecimal digits.

        Args:
            array: Name of the state array, or ``model`` for a block of ``model.safetensors``.
            chunk: Index of the chunk or block.
            data: Its bytes.
        """
        return self.digest_leaves(array, chunk, leaf_digests(data))

    def digest_leaves(self, array: str, chunk: int, leaves: bytes) -> str:
        """Return the same digest from the leaves' digests, as `leaf_digests` gives them."""
        root = xxhash.xxh3_64(leaves)
        root.update(f"{self.store_id}/{self.generation}/{array}/{chunk}".encode())
        return root.hexdigest()


def one_by_one(function: Callable[[memoryview], bytes], items: Sequence[memoryview]) -> list[bytes]:
    """Call a function for every item, here: the simplest `Run`."""
    return [function(item) for item in items]


def digest_arrays(
    context: DigestContext, chunk: int, arrays: Mapping[str, memoryview], run: Run
) -> dict[str, str]:
    """Return the digest of a chunk of each array, as `DigestContext.digest` gives it."""
    spans = [
        (name, data[start : start + _SPAN_BYTES])
        for name, data in arrays.items()
        for start in range(0, len(data), _SPAN_BYTES)
    ]
    leaves = dict.fromkeys(arrays, b"")
    for (name, _), found in zip(spans, run(leaf_digests, [s for _, s in spans]), strict=True):
        leaves[name] += found
    return {name: context.digest_leaves(name, chunk, leaves[name]) for name in arrays}


def leaf_digests(data: memoryview) -> bytes:
    """Return the digests of the leaves of `data`, 8 bytes each, in order."""
    out = bytearray()
    for start in range(0, len(data), LEAF_BYTES):
        # The object form releases the interpreter lock; xxhash's one-shot functions hold it.
        leaf = xxhash.xxh3_64()
        leaf.update(data[start : start + LEAF_BYTES])
        out += leaf.intdigest().to_bytes(8, "little")
    return bytes(out)
