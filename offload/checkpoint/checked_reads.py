"""Reads of parts of sealed ranges, each compared with the digest of its whole range.

A digest covers a whole chunk, so a reader of a few tensors reads all of the chunks that they are
in. It keeps only what it wants: a range passes through a small buffer. Nothing is returned before
the digest has been compared.

This module does not import torch.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from gds import ALIGNMENT, Backend, Buffer, File
from offload.checkpoint.sealed_slot import SealedRange
from offload.checkpoint.second_read import reread_and_check
from offload.format.digests import LEAF_BYTES, DigestContext, leaf_digests

_PART_BYTES: Final = 8 * LEAF_BYTES
"""Bytes that are read at a time; a multiple of `LEAF_BYTES`."""


class CheckedReads:
    """Reader of parts of sealed ranges.

    Args:
        backend: Storage backend of the files.
        verify: Whether ranges are compared with their digests. If not, only the bytes that are
            asked for are read.
    """

    def __init__(self, backend: Backend, *, verify: bool = True) -> None:
        self._backend = backend
        self._verify = verify
        self._buffer: Buffer | None = None
        self.bytes_read = 0
        """Number of bytes that have been read so far."""

    def read(
        self, file: File, sealed: SealedRange, context: DigestContext, start: int, stop: int
    ) -> memoryview:
        """Return bytes `start` to `stop` of a sealed range, in memory of their own.

        Args:
            file: File that holds the range.
            sealed: The range.
            context: Store and generation that the digest is bound to.
            start: First byte, counted from the start of the range.
            stop: One past the last byte.

        Raises:
            DamagedError: The range is not as it was written. Both of two reads found that.
            gds.StorageError: The range cannot be read.
        """
        kept = bytearray(stop - start)
        first, last = (0, sealed.nbytes) if self._verify else (start, stop)
        leaves = bytearray()
        for at in range(first, last, _PART_BYTES):
            end = min(at + _PART_BYTES, last)
            data = self._read(file, sealed.offset + at, end - at)
            if self._verify:
                leaves += leaf_digests(data)
            low, high = max(start, at), min(stop, end)
            if low < high:
                kept[low - start : high - start] = data[low - at : high - at]
        self.bytes_read += last - first
        if not self._verify:
            return memoryview(kept)
        found = context.digest_leaves(sealed.array, sealed.index, bytes(leaves))
        if found == sealed.digest:
            return memoryview(kept)
        again = reread_and_check(
            file,
            sealed.offset,
            sealed.nbytes,
            partial(context.digest, sealed.array, sealed.index),
            found=found,
            expected=sealed.digest,
        )
        return again.memoryview()[start:stop]

    def _read(self, file: File, offset: int, nbytes: int) -> memoryview:
        if self._buffer is None:
            self._buffer = self._backend.allocate(_PART_BYTES + ALIGNMENT)
        # The memory is aligned like the range in the file, so that whole blocks are read directly.
        part = self._buffer.slice(offset % ALIGNMENT, nbytes)
        file.read(part, offset).result()
        return part.memoryview()
