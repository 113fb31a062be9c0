"""Content digests that a CPU computes at memory speed and a GPU could compute in parallel.

A digest is xxh3_64 over the little-endian xxh3_64 digests of 1 MiB leaves, followed by a context.
The context identifies the expected bytes: store, generation, array and chunk. So a chunk that is
stale, swapped or misplaced fails as surely as one with a flipped bit. A digest detects accidents,
not forgery: xxh3 is not a cryptographic hash.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import xxhash

from offload.format.boxes import Box

MODEL_ARRAY = "model"
"""Name that stands for ``model.safetensors`` in the digests of its blocks."""

MODEL_BLOCK_BYTES = 16 << 20
"""Number of bytes of the model that one digest covers: of the data of ``model.safetensors``, or of
the box of a tensor that one owner writes. The last block of each may be shorter."""

LEAF_BYTES = 1 << 20
"""Size of a leaf in bytes; the last leaf of a chunk may be shorter."""

Run: TypeAlias = Callable[[Callable[[memoryview], bytes], Sequence[memoryview]], list[bytes]]
"""Function that calls another one for every item, perhaps on several threads, and returns the
results in the order of the items."""


def model_box_array(name: str, box: Box) -> str:
    """Return the array name that the digests of a box of the model are bound to.

    The box's notation contains no other opening bracket than its first character. So two boxes
    never have the same array name, whatever the names of their tensors are.
    """
    return f"{MODEL_ARRAY}/{name}{box.notation()}"


@dataclass(frozen=True, slots=True)
class DigestContext:
    """The store, and the generation of its state, that a digest belongs to."""

    store_id: str
    generation: int

    def digest(self, array: str, chunk: int, data: memoryview) -> str:
        """Return the digest of one chunk as 16 hexadecimal digits.

        Args:
            array: Name of the state array, or ``model`` for a block of ``model.safetensors``.
            chunk: Index of the chunk or block.
            data: Bytes of the chunk or block.
        """
        return self.digest_leaves(array, chunk, leaf_digests(data))

    def digest_leaves(self, array: str, chunk: int, leaves: bytes) -> str:
        """Return the digest of one chunk, given the leaves' digests from `leaf_digests`."""
        root = xxhash.xxh3_64(leaves)
        root.update(f"{self.store_id}/{self.generation}/{array}/{chunk}".encode())
        return root.hexdigest()


def one_by_one(function: Callable[[memoryview], bytes], items: Sequence[memoryview]) -> list[bytes]:
    """Call a function for every item on the calling thread; this is the simplest `Run`."""
    return [function(item) for item in items]


class ChunkDigests:
    """Digests of one chunk of every state array, computed while its bytes are still in cache.

    A digest takes much longer to compute from memory than from a cache. So writers report the bytes
    that are final, and the thread that completes a leaf digests it at once. This is fastest if
    whole leaves are reported. `finish` digests the leaves that were never completed.

    Args:
        arrays: Bytes of the chunk in each array, by name. The memory must stay in place.
    """

    def __init__(self, arrays: Mapping[str, memoryview]) -> None:
        self._arrays = dict(arrays)
        self._digests = {name: [b""] * -(-len(a) // LEAF_BYTES) for name, a in arrays.items()}
        """Digest of each leaf of each array; empty bytes if there is none yet."""
        self._written: dict[tuple[str, int], int] = {}
        """Number of final bytes in each leaf that is reported piece by piece, by array and leaf
        number."""
        self._lock = threading.Lock()

    def written(self, array: str, start: int, stop: int) -> None:
        """Report that the bytes of an array from `start` to `stop` are final.

        Each byte may be reported only once. Any thread may call this.
        """
        data, digests = self._arrays[array], self._digests[array]
        if stop - start == LEAF_BYTES and not start % LEAF_BYTES:  # the usual case, kept short
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

    def digested(self, array: str, number: int, digest: bytes) -> None:
        """Report the digest of a leaf whose bytes are final, so that it is not computed again.

        Args:
            array: Name of the array.
            number: Number of the leaf.
            digest: Result of `leaf_digest` for its bytes.
        """
        self._digests[array][number] = digest

    def finish(self, context: DigestContext, chunk: int, run: Run) -> dict[str, str]:
        """Return the digest of each array, as `DigestContext.digest` returns it.

        Args:
            context: Context of the digests.
            chunk: Index of the chunk.
            run: Function that computes the digests of the leaves that were never completed.
        """
        missing = [
            (name, number)
            for name, digests in self._digests.items()
            for number, digest in enumerate(digests)
            if not digest
        ]
        if missing:
            found = run(leaf_digest, [self.leaf(*leaf) for leaf in missing])
            for (name, number), digest in zip(missing, found, strict=True):
                self._digests[name][number] = digest
        return {
            name: context.digest_leaves(name, chunk, b"".join(digests))
            for name, digests in self._digests.items()
        }

    def leaf(self, array: str, number: int) -> memoryview:
        """Return the bytes of a leaf."""
        return self._arrays[array][number * LEAF_BYTES : (number + 1) * LEAF_BYTES]


def leaf_digests(data: memoryview) -> bytes:
    """Return the digests of the leaves of `data` in order, 8 bytes each."""
    starts = range(0, len(data), LEAF_BYTES)
    return b"".join(leaf_digest(data[start : start + LEAF_BYTES]) for start in starts)


def leaf_digest(leaf: memoryview) -> bytes:
    """Return the digest of one leaf: 8 bytes, little-endian."""
    # This is a single call because right after an update, the code of each further call would have
    # to be fetched from memory. From xxhash 4 on it releases the interpreter lock.
    return xxhash.xxh3_64_digest(leaf)[::-1]  # xxhash's own order is big-endian


class LeafStream:
    """Digests of the leaves of bytes that arrive in pieces, in order; see `leaf_digests`."""

    def __init__(self) -> None:
        self._leaf = xxhash.xxh3_64()
        self._nbytes = 0
        self._found: list[bytes] = []

    def update(self, piece: memoryview) -> None:
        """Add bytes. They may change as soon as this returns."""
        start = 0
        while start < len(piece):
            part = piece[start : start + LEAF_BYTES - self._nbytes]
            start += len(part)
            if len(part) == LEAF_BYTES:
                self._found.append(leaf_digest(part))
                continue
            self._leaf.update(part)
            self._nbytes += len(part)
            if self._nbytes == LEAF_BYTES:
                self._end_leaf()

    def finish(self) -> bytes:
        """Return the digests of all leaves, the last one as short as it is, and begin anew."""
        if self._nbytes:
            self._end_leaf()
        leaves, self._found = b"".join(self._found), []
        return leaves

    def _end_leaf(self) -> None:
        self._found.append(self._leaf.digest()[::-1])  # as `leaf_digest` does
        self._leaf.reset()
        self._nbytes = 0


class Digests(Protocol):
    """Digests of one chunk of every state array, in any kind of memory; see `ChunkDigests`."""

    def written(self, array: str, start: int, stop: int) -> None:
        """Report that the bytes of an array from `start` to `stop` are final, each only once."""
        ...

    def digested(self, array: str, number: int, digest: bytes) -> None:
        """Report the digest of a leaf whose bytes are final, as `leaf_digest` returns it."""
        ...

    def finish(self, context: DigestContext, chunk: int, run: Run) -> dict[str, str]:
        """Return the digest of each array, as `DigestContext.digest` returns it."""
        ...


class Content(NamedTuple):
    """Content of a model file, as processes name it that each know a part of it."""

    name: str = ""
    """Name that no other content has, of this or another file; empty if nothing may be known."""

    readable: bool = False
    """See `KnownLeaves.readable`."""


class KnownLeaves:
    """Digests of the leaves of a model file, block by block, so that a seal skips what it holds.

    Only digests are relied on that this process has computed itself, from bytes that it wrote to
    the file or read from it.

    Args:
        inode: Inode of the file, so that another file of the same name is not taken for it; 0 if
            the inode is not known.
        readable: Initial value of `readable`.
    """

    def __init__(self, inode: int = 0, *, readable: bool) -> None:
        self.inode = inode
        self.readable = readable
        """Whether unknown blocks may be read back and trusted. They may not if the file has no
        content yet, or if a write or a sync has failed: then a cache may hold what the drive does
        not."""
        self._blocks: dict[int, list[bytes | None]] = {}
        """Digest of each leaf of a block; None for a leaf that is not known."""
        self._name = uuid.uuid4().hex

    @property
    def content(self) -> Content:
        """Content of the file. It has another name whenever it has been forgotten."""
        return Content(self._name, self.readable)

    def of(self, block: int) -> bytes | None:
        """Return the digests of a block that was noted as a whole, 8 bytes each; None otherwise."""
        leaves = self._blocks.get(block, [None])
        return None if None in leaves else b"".join(filter(None, leaves))

    def leaves(self, block: int, num: int) -> list[bytes | None]:
        """Return the digest of each of the first `num` leaves of a block; None if not known."""
        leaves = self._blocks.get(block, [])
        return [*leaves[:num], *[None] * (num - len(leaves))]

    def note(self, block: int, leaves: bytes) -> None:
        """Record the content of a block: the digests of its leaves in order, 8 bytes each."""
        self._blocks[block] = [leaves[at : at + 8] for at in range(0, len(leaves), 8)]

    def note_leaves(self, first: int, digests: Sequence[bytes | None]) -> None:
        """Record the content of neighbouring leaves of a file whose blocks lie end to end.

        Args:
            first: Number of the first leaf, counted from the start of the file's data.
            digests: Digest of each leaf; None for one whose content is not known any more.
        """
        for number, digest in enumerate(digests, first):
            block, leaf = divmod(number, MODEL_BLOCK_BYTES // LEAF_BYTES)
            leaves = self._blocks.setdefault(block, [])
            leaves += [None] * (leaf + 1 - len(leaves))
            leaves[leaf] = digest

    def forget(self, *, readable: bool) -> None:
        """Forget the digests of all blocks.

        Args:
            readable: Whether unknown blocks may be read back from now on.
        """
        self._blocks.clear()
        self._name = uuid.uuid4().hex
        self.readable = readable

    def __len__(self) -> int:
        """Return the number of known blocks."""
        return len(self._blocks)
