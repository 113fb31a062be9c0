"""Reader of ranges of bytes out of sealed chunks, which compares all of them with the digests.

A digest covers a whole chunk: it is made of the digests of the chunk's leaves, of 1 MiB each. So
when a chunk is first needed, all of it is read, through a few leaves of memory. From then on the
digests of its leaves are known, and a range costs the leaves that it lies in. Leaves that were read
last stay in memory.

This module does not import torch.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

from gds import ALIGNMENT, Buffer, File, IOFuture
from gds.buffers.host import HostBuffer
from offload.checkpoint.sealed_slot import SealedRange
from offload.checkpoint.second_read import reread_and_check
from offload.errors import DamagedError
from offload.format.digests import LEAF_BYTES, DigestContext, leaf_digest

_log = logging.getLogger("offload")

AT_ONCE: Final = 8
"""Number of leaves whose reads are in flight at a time: the least that a reader keeps."""

_Chunk: TypeAlias = tuple[str, str, int]
"""Path of a file, name of the state array, and index of a chunk in it."""


class CheckedReads:
    """Reader of parts of sealed ranges, each compared with the digests of its whole range.

    Args:
        keep: Number of leaves that stay in memory: a chunk of the default size, and some more.
        verify: Whether ranges are compared with their digests. If not, only the bytes that are
            asked for are read.
    """

    def __init__(self, *, keep: int = 40, verify: bool = True) -> None:
        self._keep = keep
        self._verify = verify
        self._digests: dict[_Chunk, bytes] = {}
        """Digests of the leaves of each chunk that has been read, 8 bytes each."""
        self._held: OrderedDict[tuple[_Chunk, int], Buffer] = OrderedDict()
        """Leaves in memory, the one that was used last at the end."""
        self._memory: list[HostBuffer] = []
        """Memory of leaves that hold nothing."""
        self._lent: dict[tuple[_Chunk, int], HostBuffer] = {}
        """Memory of each leaf in `_held`."""
        self.bytes_read = 0
        """Number of bytes that have been read so far."""

    def copy(
        self,
        file: File,
        sealed: SealedRange,
        context: DigestContext,
        start: int,
        stop: int,
        out: memoryview,
    ) -> None:
        """Copy bytes of a chunk.

        Args:
            file: File that holds the chunk.
            sealed: The chunk.
            context: Store and generation that its digest is bound to.
            start: First byte, counted from the start of the chunk.
            stop: One past the last byte.
            out: Memory of `stop` - `start` bytes.

        Raises:
            DamagedError: The chunk is not as it was written. Both of two reads found that.
            gds.StorageError: The chunk cannot be read.
        """
        if not self._verify:
            self._copy_unchecked(file, sealed.offset, start, stop, out)
            return
        chunk = (file.path, sealed.array, sealed.index)
        known = self._digests.get(chunk)
        if known is None:
            self._digests[chunk] = self._read_all(file, sealed, context, start, stop, out)
            return
        numbers = range(start // LEAF_BYTES, -(-stop // LEAF_BYTES))
        for number, data, is_new in self._leaves(file, sealed, numbers):
            if is_new:
                self._check(file, sealed, number, data, known[8 * number : 8 * number + 8])
            _take(data, number, start, stop, out)

    def read(
        self, file: File, sealed: SealedRange, context: DigestContext, start: int, stop: int
    ) -> memoryview:
        """Return bytes of a chunk, in memory of their own; see `copy`."""
        out = memoryview(bytearray(stop - start))
        self.copy(file, sealed, context, start, stop, out)
        return out

    def _copy_unchecked(
        self, file: File, offset: int, start: int, stop: int, out: memoryview
    ) -> None:
        """Copy bytes of a chunk that begins at `offset` in the file, and read no others."""
        if not self._memory:
            self._memory.append(HostBuffer(LEAF_BYTES + ALIGNMENT))
        for at in range(start, stop, LEAF_BYTES):
            end = min(at + LEAF_BYTES, stop)
            # The memory is aligned like the range in the file: whole blocks are read directly.
            part = self._memory[0].slice((offset + at) % ALIGNMENT, end - at)
            file.read(part, offset + at).result()
            out[at - start : end - start] = part.memoryview()
            self.bytes_read += end - at

    def close(self) -> None:
        """Free the memory. Idempotent."""
        self._held.clear()
        self._lent.clear()
        self._memory.clear()

    def _read_all(
        self,
        file: File,
        sealed: SealedRange,
        context: DigestContext,
        start: int,
        stop: int,
        out: memoryview,
    ) -> bytes:
        """Read a whole chunk and compare it with its digest; return the digests of its leaves.

        The wanted bytes are copied on the way, so that a large chunk is read once.
        """
        everything = range(-(-sealed.nbytes // LEAF_BYTES))
        found = ""
        for is_second in (False, True):
            self._drop((file.path, sealed.array, sealed.index))
            leaves = bytearray()
            for number, data, _ in self._leaves(file, sealed, everything, again=is_second):
                leaves += leaf_digest(data)
                _take(data, number, start, stop, out)
            first, found = found, context.digest_leaves(sealed.array, sealed.index, bytes(leaves))
            if found == sealed.digest:
                if is_second:
                    _log.warning(
                        "%s: bytes %d to %d: one read returned other data (digest %s) than a "
                        "second one (digest %s, as expected): check the memory, the cables and "
                        "the drive of this machine",
                        *(file.path, sealed.offset, sealed.offset + sealed.nbytes, first, found),
                    )
                return bytes(leaves)
        self._drop((file.path, sealed.array, sealed.index))
        raise DamagedError(
            f"{file.path}: bytes {sealed.offset} to {sealed.offset + sealed.nbytes} are damaged: "
            f"their digest is {found}, expected {sealed.digest}"
        )

    def _leaves(
        self, file: File, sealed: SealedRange, numbers: Sequence[int], *, again: bool = False
    ) -> Iterator[tuple[int, memoryview, bool]]:
        """Yield leaves by number, each with its bytes and whether it was not in memory before.

        The bytes are valid until the next leaf is asked for.
        """
        chunk = (file.path, sealed.array, sealed.index)
        for first in range(0, len(numbers), AT_ONCE):
            batch = numbers[first : first + AT_ONCE]
            missing = [number for number in batch if (chunk, number) not in self._held]
            for number in batch:
                if number not in missing:
                    self._held.move_to_end((chunk, number))
            reads: list[IOFuture] = []
            try:
                for number in missing:
                    offset = sealed.offset + number * LEAF_BYTES
                    nbytes = min(LEAF_BYTES, sealed.nbytes - number * LEAF_BYTES)
                    buffer = self._take((chunk, number), offset % ALIGNMENT, nbytes)
                    if again:
                        reads.append(file.read_again(buffer, offset, direct=not file.direct))
                    else:
                        reads.append(file.read(buffer, offset))
                    self.bytes_read += nbytes
            finally:
                failed = _first_error(reads)
                if failed is not None or len(reads) < len(missing):
                    for number in missing:
                        self._release((chunk, number))
            if failed is not None:
                raise failed
            for number in batch:
                yield number, self._held[chunk, number].memoryview(), number in missing

    def _take(self, leaf: tuple[_Chunk, int], pad: int, nbytes: int) -> Buffer:
        """Return memory for a leaf, aligned as the leaf is in its file."""
        if len(self._held) >= self._keep:
            self._release(next(iter(self._held)))
        memory = self._memory.pop() if self._memory else HostBuffer(LEAF_BYTES + ALIGNMENT)
        self._lent[leaf] = memory
        self._held[leaf] = memory.slice(pad, nbytes)
        return self._held[leaf]

    def _release(self, leaf: tuple[_Chunk, int]) -> None:
        if self._held.pop(leaf, None) is not None:
            self._memory.append(self._lent.pop(leaf))

    def _drop(self, chunk: _Chunk) -> None:
        for leaf in [leaf for leaf in self._held if leaf[0] == chunk]:
            self._release(leaf)

    def _check(
        self, file: File, sealed: SealedRange, number: int, data: memoryview, expected: bytes
    ) -> None:
        """Compare a leaf that was read again with its digest, and reread it if it differs."""
        found = leaf_digest(data)
        if found == expected:
            return
        try:
            right = reread_and_check(
                file,
                sealed.offset + number * LEAF_BYTES,
                len(data),
                lambda leaf: leaf_digest(leaf).hex(),
                found=found.hex(),
                expected=expected.hex(),
            )
        except BaseException:
            self._drop((file.path, sealed.array, sealed.index))
            raise
        data[:] = right.memoryview()


def _take(data: memoryview, number: int, start: int, stop: int, out: memoryview) -> None:
    """Copy the bytes of a leaf that are wanted."""
    at = number * LEAF_BYTES
    low, high = max(start, at), min(stop, at + len(data))
    if low < high:
        out[low - start : high - start] = data[low - at : high - at]


def _first_error(reads: Sequence[IOFuture]) -> Exception | None:
    """Wait for all reads, and return the first error of one."""
    first = None
    for read in reads:
        try:
            read.result()
        except Exception as error:  # noqa: BLE001  (the caller raises it)
            first = first or error
    return first
