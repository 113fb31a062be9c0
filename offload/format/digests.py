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
from typing import Protocol, TypeAlias

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

    From memory a digest takes much longer than from a cache. So whoever writes says what is done,
    and whichever thread completes a leaf digests it at once; best of all is to write whole leaves.
    Leaves that nobody has completed are digested in the end.

    Args:
        arrays: The bytes of the chunk in each array; they must stay where they are.
    """

    def __init__(self, arrays: Mapping[str, memoryview]) -> None:
        self._arrays = dict(arrays)
        self._digests = {name: [b""] * -(-len(a) // LEAF_BYTES) for name, a in arrays.items()}
        """Of each leaf of each array; empty where there is none yet."""
        self._written: dict[tuple[str, int], int] = {}
        """Bytes that are final of leaves of which not all are."""
        self._lock = threading.Lock()

    def written(self, array: str, start: int, stop: int) -> None:
        """Say that these bytes of an array are final; each may be named once. From any thread."""
        data, digests = self._arrays[array], self._digests[array]
        if stop - start == LEAF_BYTES and not start % LEAF_BYTES:  # the usual case, in few words
            digests[start // LEAF_BYTES] = leaf_digest(data[start:stop])
            return
        while start < stop:
            number, offset = divmod(start, LEAF_BYTES)
            leaf = data[start - offset : start - offset + LEAF_BYTES]
            num = min(stop - start, len(leaf) - offset)
            with self._lock:
                final = self._written[array, number] = self._written.get((array, number), 0) + num
            if final == len(leaf):
                digests[number] = leaf_digest(leaf)
            start += num

    def finish(self, context: DigestContext, chunk: int, run: Run) -> dict[str, str]:
        """Return the digest of each array, as `DigestContext.digest` gives it."""
        missing = [
            (name, number)
            for name, digests in self._digests.items()
            for number, digest in enumerate(digests)
            if not digest
        ]
        if missing:
            found = run(leaf_digest, [self._leaf(*leaf) for leaf in missing])
            for (name, number), digest in zip(missing, found, strict=True):
                self._digests[name][number] = digest
        return {
            name: context.digest_leaves(name, chunk, b"".join(digests))
            for name, digests in self._digests.items()
        }

    def _leaf(self, array: str, number: int) -> memoryview:
        return self._arrays[array][number * LEAF_BYTES : (number + 1) * LEAF_BYTES]


def leaf_digests(data: memoryview) -> bytes:
    """Return the digests of the leaves of `data`, 8 bytes each, in order."""
    starts = range(0, len(data), LEAF_BYTES)
    return b"".join(leaf_digest(data[start : start + LEAF_BYTES]) for start in starts)


def leaf_digest(leaf: memoryview) -> bytes:
    """Return the digest of one leaf: 8 bytes, little-endian."""
    # In one call, which (from xxhash 4 on) releases the interpreter lock: right after an update the
    # code of each further call would have to be fetched from memory.
    return xxhash.xxh3_64_digest(leaf)[::-1]  # xxhash's own order is big-endian


class Digests(Protocol):
    """Digests of one chunk of every state array, wherever it is; see `ChunkDigests`."""

    def written(self, array: str, start: int, stop: int) -> None:
        """Say that these bytes of an array are final; each may be named once."""
        ...

    def finish(self, context: DigestContext, chunk: int, run: Run) -> dict[str, str]:
        """Return the digest of each array, as `DigestContext.digest` gives it."""
        ...
