"""Content digests that a CPU computes at memory speed and a GPU could compute in parallel.

A digest is xxh3_64 over the little-endian xxh3_64 digests of 1 MiB leaves, followed by a context
that says which bytes these ought to be: store, generation, array and chunk. A chunk that is stale,
swapped or misplaced therefore fails as surely as one with a flipped bit. It detects accidents, not
forgery: xxh3 is not a cryptographic hash.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import xxhash

LEAF_BYTES = 1 << 20
"""Bytes of one leaf; the last one of a chunk may be shorter."""

Run: TypeAlias = Callable[[Callable[[memoryview], bytes], Sequence[memoryview]], list[bytes]]
"""Calls a function for every item, perhaps on several threads; returns the results in order."""


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


class ChunkDigests:
    """Digests of one chunk of every state array, taken while what was written is still in cache.

    Reading memory is most of what a digest costs (`bench.digests`). So whoever writes says what is
    done, and whichever thread completes a leaf digests it at once. Leaves that nobody has completed
    are digested in the end.

    Args:
        arrays: The bytes of the chunk in each array; they must stay where they are.
    """

    def __init__(self, arrays: Mapping[str, memoryview]) -> None:
        self._leaves = {
            name: [data[start : start + LEAF_BYTES] for start in range(0, len(data), LEAF_BYTES)]
            for name, data in arrays.items()
        }
        self._remaining = {n: [len(leaf) for leaf in ls] for n, ls in self._leaves.items()}
        self._digests: dict[tuple[str, int], bytes] = {}
        self._lock = threading.Lock()

    def written(self, array: str, start: int, stop: int) -> None:
        """Say that these bytes of an array are final; each may be named once. From any thread."""
        remaining = self._remaining[array]
        for leaf in range(start // LEAF_BYTES, -(-stop // LEAF_BYTES)):
            first = leaf * LEAF_BYTES
            with self._lock:
                remaining[leaf] -= min(stop, first + LEAF_BYTES) - max(start, first)
                completed = remaining[leaf] == 0
            if completed:
                self._digests[array, leaf] = leaf_digests(self._leaves[array][leaf])

    def finish(self, context: DigestContext, chunk: int, run: Run) -> dict[str, str]:
        """Return the digest of each array, as `DigestContext.digest` gives it."""
        missing = [
            (name, leaf)
            for name, leaves in self._leaves.items()
            for leaf in range(len(leaves))
            if (name, leaf) not in self._digests
        ]
        found = run(leaf_digests, [self._leaves[name][leaf] for name, leaf in missing])
        self._digests.update(zip(missing, found, strict=True))
        return {
            name: context.digest_leaves(
                name, chunk, b"".join(self._digests[name, leaf] for leaf in range(len(leaves)))
            )
            for name, leaves in self._leaves.items()
        }


def leaf_digests(data: memoryview) -> bytes:
    """Return the digests of the leaves of `data`, 8 bytes each, in order."""
    out = bytearray()
    for start in range(0, len(data), LEAF_BYTES):
        # The object form releases the interpreter lock; xxhash's one-shot functions hold it.
        leaf = xxhash.xxh3_64()
        leaf.update(data[start : start + LEAF_BYTES])
        out += leaf.intdigest().to_bytes(8, "little")
    return bytes(out)
