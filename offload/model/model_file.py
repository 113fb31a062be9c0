"""``model.safetensors``: copying between its bytes and live tensors, block by block.

A block is `MODEL_BLOCK_BYTES` of the file's data, and one digest covers it. Sealing a model of any
size takes three buffers of one block each, so that two writes are in flight while a block is
copied, and a fourth one if the seal reads a slot's content back. Restoring takes four, so that
three reads are in flight while a block is checked and copied. `model_writing` describes how a seal
writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from gds import ALIGNMENT, Backend, Buffer, File, IOFuture, StorageError
from offload.device.boundary import Marks, boundary_of
from offload.device.staging import Traffic
from offload.format.digests import MODEL_ARRAY, MODEL_BLOCK_BYTES, DigestContext
from offload.format.header import Header
from offload.model.tensor_image import TensorImage


class BlockMemory(NamedTuple):
    """Memory of one block."""

    buffer: Buffer

    tensor: torch.Tensor
    """The same bytes as a tensor, dtype uint8."""

    locks: list[object]
    """Objects that keep the memory page-locked for devices."""

    def first(self, nbytes: int) -> tuple[Buffer, torch.Tensor]:
        """Return the first bytes, as a buffer and as a tensor."""
        return self.buffer.slice(0, nbytes), self.tensor[:nbytes]


_KEPT, _WRITING, _READING = 2, 3, 4
"""Number of blocks of memory: at first, of a seal, and of a restore. With fewer the drive is idle
for a while whenever transfers have ended, or has fewer requests than its fastest rate takes."""


class BlockBuffers:
    """Buffers of one block each, shared by seals and restores.

    There are two at first. A seal of more blocks adds a third one, which is kept. What a restore
    adds is freed when it ends.

    Args:
        backend: Backend that allocates the buffers.
        data_bytes: Bytes of the model file's data; no buffer needs to be larger.
        traffic: Counter of the bytes that cross between the buffers and devices.
        block_bytes: Size of a block in bytes; None for `MODEL_BLOCK_BYTES`.
    """

    def __init__(
        self,
        backend: Backend,
        data_bytes: int,
        traffic: Traffic | None = None,
        *,
        block_bytes: int | None = None,
    ) -> None:
        self.traffic = traffic or Traffic()
        self._backend = backend
        self._devices: list[torch.device] = []
        most = MODEL_BLOCK_BYTES if block_bytes is None else block_bytes
        self.block_bytes = -(-max(min(most, data_bytes), 1) // ALIGNMENT) * ALIGNMENT
        """Size of a block in bytes."""
        self._memory = [self._allocate() for _ in range(_KEPT)]
        self._spare: Buffer | None = None

    def page_lock_for(self, devices: Iterable[torch.device]) -> BlockBuffers:
        """Page-lock the buffers for fast copies from and to these devices; return self."""
        for device in devices:
            if device not in self._devices:
                self._devices.append(device)
                for memory in self._memory:
                    memory.locks.append(boundary_of(device).lock_pages(memory.tensor))
        return self

    def for_writing(self, num_blocks: int) -> Sequence[BlockMemory]:
        """Return the memory through which a seal writes: two or three blocks.

        There are two if the seal has no more blocks, or if there is no memory for a third one.
        """
        self._memory += self._more(min(num_blocks, _WRITING))
        return self._memory

    def for_reading(self, num_blocks: int) -> Sequence[BlockMemory]:
        """Return the memory through which blocks are read: at least two blocks, at most four.

        There are fewer than four if fewer are read, or if there is no memory for more. Blocks that
        are allocated by this call are freed with the list.
        """
        return [*self._memory, *self._more(min(num_blocks, _READING))]

    @property
    def nbytes(self) -> int:
        """Total size of the buffers in bytes, without those that a restore adds."""
        spare = 0 if self._spare is None else self._spare.nbytes
        return sum(memory.buffer.nbytes for memory in self._memory) + spare

    def get(self, index: int, nbytes: int) -> tuple[Buffer, torch.Tensor]:
        """Return a block's memory, as a buffer and as a tensor; every second block shares it."""
        return self._memory[index % _KEPT].first(nbytes)

    def spare(self, nbytes: int) -> Buffer:
        """Return one more buffer, separate from all others; allocated at the first call.

        Raises:
            MemoryError: There is no memory left.
        """
        if self._spare is None:
            self._spare = self._backend.allocate(self.block_bytes)
        return self._spare.slice(0, nbytes)

    def _more(self, wanted: int) -> list[BlockMemory]:
        """Allocate the blocks that are missing, or as many as there is memory for."""
        found: list[BlockMemory] = []
        with suppress(MemoryError):
            while len(self._memory) + len(found) < wanted:
                found.append(self._allocate())
        return found

    def _allocate(self) -> BlockMemory:
        buffer = self._backend.allocate(self.block_bytes)
        tensor = torch.frombuffer(buffer.memoryview(), dtype=torch.uint8)
        locks = [boundary_of(device).lock_pages(tensor) for device in self._devices]
        return BlockMemory(buffer, tensor, locks)


class ModelImage(TensorImage):
    """Live tensors, viewed as the bytes of a model file.

    Args:
        header: Header of the file, which maps tensors to bytes.
        tensors: Live tensor for each name, with the header's dtype and shape. The values of a
            tensor on a device are those that the work up to `marks` computes.
        marks: Points in the streams of the devices; None for the end of the work that is queued so
            far on the calling thread's current streams.
        traffic: Counter of the bytes that cross.
        file: Model file with the values of tensors that are in no memory; None if there are none.
        elsewhere: Names of those that are not in this file, each with another file that has the
            value, and the place of its first byte there.
    """

    def __init__(
        self,
        header: Header,
        tensors: Mapping[str, torch.Tensor],
        marks: Marks | None = None,
        traffic: Traffic | None = None,
        file: File | None = None,
        elsewhere: Mapping[str, tuple[File, int]] | None = None,
    ) -> None:
        entries = [entry for entry in header.entries.values() if entry.nbytes]
        names = [entry.name for entry in entries]
        super().__init__([tensors[name] for name in names], marks, traffic, names=names)
        self.data_start = header.data_start
        self._file = file
        self._elsewhere = elsewhere or {}

    def read_filed(self, index: int, first: int, out: torch.Tensor) -> None:
        """Read bytes of a tensor that has no memory from the file that has its value."""
        own = self._file, self.data_start + self._starts[index]
        file, start = self._elsewhere.get(self._names[index], own)
        if file is None:
            super().read_filed(index, first, out)
            return
        data = file.read_bytes(start + first, len(out))
        out.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def reads_only(self, file: File) -> bool:
        """Return whether all values that are elsewhere are in one file."""
        return all(one is file for one, _ in self._elsewhere.values())

    def is_in_file(self, start: int, stop: int) -> bool:
        """Return whether the file has the values of all tensors with a byte in a range."""
        names = self.filed(start, stop)
        return bool(names) and self._elsewhere.keys().isdisjoint(names)

    def is_elsewhere(self, start: int, stop: int) -> bool:
        """Return whether another file has the values of all tensors with a byte in a range."""
        names = self.filed(start, stop) if self._elsewhere else ()
        return bool(names) and self._elsewhere.keys() >= set(names)

    def blocks(self) -> Iterator[tuple[int, int, int]]:
        """Yield index, first byte, and one past the last byte of every block of the data."""
        for index, start in enumerate(range(0, self.data_bytes, MODEL_BLOCK_BYTES)):
            yield index, start, min(start + MODEL_BLOCK_BYTES, self.data_bytes)


def digest_model(
    image: ModelImage,
    buffers: BlockBuffers,
    context: DigestContext,
    filed: Sequence[str] = (),
) -> list[str]:
    """Return the digests that `write_model` would return, without writing.

    Args:
        image: Live tensors.
        buffers: Memory for copying.
        context: Store and generation of the digests.
        filed: Digests of the file's blocks. Those of blocks that are in no memory are taken as they
            are.
    """
    digests = []
    for index, start, stop in image.blocks():
        if filed and image.filed(start, stop):
            digests.append(filed[index])
            continue
        buffer, data = buffers.get(index, stop - start)
        image.gather(start, stop, data)
        digests.append(context.digest(MODEL_ARRAY, index, buffer.memoryview()))
    return digests


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
