"""Content that an earlier process left in a model file, read back so that it need not be written.

None of it is believed unseen: a seal compares digests of what was read with those of live tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gds import File, IOFuture, StorageError
from offload.model.model_file import BlockBuffers


class ReadBack:
    """Reads of one model file into the spare memory of a seal.

    Args:
        file: The file.
        buffers: Memory for copying; its spare block is used.
    """

    def __init__(self, file: File, buffers: BlockBuffers) -> None:
        self._file = file
        self._buffers = buffers
        self._reads: list[tuple[int, int, IOFuture]] = []

    @property
    def is_under_way(self) -> bool:
        """Whether reads have begun whose results have not been taken."""
        return bool(self._reads)

    def start(self, nbytes: int, parts: Iterable[tuple[int, int, int]]) -> None:
        """Begin to read parts of the file. What cannot be read is left out.

        Args:
            nbytes: Size of the memory in bytes, at most a block of the buffers.
            parts: For each part, its first byte in the memory and one past the last, and its first
                byte in the file.
        """
        try:
            memory = self._buffers.spare(nbytes)
            for first, last, offset in parts:
                part = memory.slice(first, last - first)
                # The read bypasses the page cache, which may hold writes of an earlier process
                # that never reached the drive.
                read = self._file.read_again(part, offset, direct=True)
                self._reads.append((first, last, read))
        except (StorageError, MemoryError):
            return  # what cannot be read is written

    def take(self) -> Iterator[tuple[int, memoryview]]:
        """Wait for the reads; yield, for each that has succeeded, its place and its bytes.

        The bytes are valid until the next `start`.
        """
        for first, last, read in self._reads:
            if not has_failed(read):  # a bad place on the drive: writing is the best remedy
                yield first, self._buffers.spare(last).memoryview()[first:last]
        self._reads.clear()

    def wait(self) -> None:
        """Wait until no read uses the memory or the file any more; never raises errors."""
        for _, _, read in self._reads:
            has_failed(read)


def has_failed(transfer: IOFuture) -> bool:
    """Wait for a transfer; return whether it has failed."""
    try:
        transfer.result()
    except OSError:
        return True
    return False
