"""Reader of parameters that are only in the model file of the slot that holds the state."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gds import Buffer, IOFuture
from offload.checkpoint.checked_reads import AT_ONCE, CheckedReads
from offload.checkpoint.sealed_slot import SealedRange, model_file
from offload.errors import DamagedError
from offload.format.manifest import Manifest
from offload.format.model_places import ModelPlaces
from offload.store.slots.slot import Slot
from offload.stream.streamer import Streamer


class ModelReader:
    """Reads ranges of the data of one slot's model file; used by one thread.

    It is of use until the state moves to another slot. If the slot was restored, every block (of
    16 MiB) is compared with its digest, as a whole, when the first of its bytes is read. What this
    process has written is read as it is, once its writes have ended. Parameters of resident chunks
    (``host_memory=``) are in the file of a sealed slot only.

    Args:
        slot: Slot that holds the state.
        streamer: Streamer that may still be writing to the slot.
        restored: Manifest of the slot, if it was restored; None if this process has written it.
        damaged: Called with damage that is found; returns what the user can do, for the message.
    """

    def __init__(
        self,
        slot: Slot,
        streamer: Streamer,
        *,
        restored: Manifest | None = None,
        damaged: Callable[[DamagedError], str] = lambda _: "",
    ) -> None:
        self._slot = slot
        self._streamer = streamer
        self._places = ModelPlaces(slot.layout)
        self._damaged = damaged
        blocks = () if restored is None else model_file(restored).ranges
        self._unchecked: dict[int, SealedRange] = dict(enumerate(blocks))
        """Blocks that have not been compared with their digests yet, by index."""
        self._block_bytes = max((block.nbytes for block in blocks), default=1)
        self._checked_reads = CheckedReads(keep=AT_ONCE)

    def position(self, start: int) -> int:
        """Return the position in the file of a byte of its data."""
        return self._places.data_start + start

    def start(self, parts: Sequence[tuple[int, Buffer]]) -> list[IOFuture]:
        """Read parts of the file; they are in memory when all returned transfers have ended.

        Args:
            parts: First byte of each part, counted from the start of the file's data, and memory
                for all of it. Its address should be the byte's place in the file, modulo 4096, or
                the transfer is not direct.

        Raises:
            DamagedError: A block of a restored slot is not as it was written. Names the file, and
                what to do. Nothing of the block is in memory then.
            gds.StorageError: The file cannot be read, or a write to the slot has failed.
        """
        chunks = {
            chunk
            for start, into in parts
            for chunk in self._places.chunks_with(start, start + into.nbytes)
        }
        self._streamer.wait_written(chunks)
        futures = []
        for start, into in parts:
            if not self._check(start, into):
                futures.append(self._slot.model.read(into, self._places.data_start + start))
        return futures

    def check_all(self) -> None:
        """Compare all blocks with their digests that have not been compared; see `start`."""
        file, context = self._slot.model, self._slot.context
        for index, block in list(self._unchecked.items()):
            memory = bytearray(block.nbytes)
            try:
                self._checked_reads.copy(file, block, context, 0, block.nbytes, memoryview(memory))
            except DamagedError as error:
                raise self._advised(error) from error
            del self._unchecked[index]

    def close(self) -> None:
        """Free memory. Idempotent."""
        self._checked_reads.close()

    def _advised(self, error: DamagedError) -> DamagedError:
        return DamagedError("; ".join(filter(None, [str(error), self._damaged(error)])))

    def _check(self, start: int, into: Buffer) -> bool:
        """Compare the blocks that hold a part, unless they have been; return whether it is read."""
        if not self._unchecked:
            return False
        stop = start + into.nbytes
        first, last = start // self._block_bytes, -(-stop // self._block_bytes)
        blocks = range(first, last) if into.nbytes else range(0)
        if self._unchecked.keys().isdisjoint(blocks):
            return False
        file, context = self._slot.model, self._slot.context
        for index in blocks:
            begin = index * self._block_bytes
            low, high = max(start, begin), min(stop, begin + self._block_bytes)
            out = into.slice(low - start, high - low)
            if index not in self._unchecked:
                file.read(out, self._places.data_start + low).result()
                continue
            block = self._unchecked[index]
            data = out.memoryview()
            try:
                self._checked_reads.copy(file, block, context, low - begin, high - begin, data)
            except DamagedError as error:
                data[:] = bytes(len(data))
                raise self._advised(error) from error
            del self._unchecked[index]
        return True
