"""``model.safetensors``: copying between its bytes and live tensors, block by block.

A block is `MODEL_BLOCK_BYTES` of the file's data, and one digest covers it. Sealing a model of any
size takes two buffers of one block each, and a third one if the seal reads a slot's content back.
Restoring takes three, so that two reads are in flight while a block is checked and copied.
`model_writing` describes how a seal writes.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import torch

from gds import ALIGNMENT, Backend, Buffer, File, IOFuture
from offload.checkpoint.second_read import reread_and_check
from offload.device.boundary import (
    Copies,
    Event,
    Marks,
    boundary_of,
    is_on_device,
    marks_of,
)
from offload.device.staging import Traffic
from offload.format.digests import MODEL_ARRAY, DigestContext, leaf_digests
from offload.format.header import Header
from offload.format.known_leaves import KnownLeaves
from offload.format.manifest import MODEL_BLOCK_BYTES


class _Memory(NamedTuple):
    """Memory of one block."""

    buffer: Buffer

    tensor: torch.Tensor
    """The same bytes as a tensor, dtype uint8."""

    locks: Sequence[object] = ()
    """Objects that keep the memory page-locked, if this entry alone owns the memory."""


class BlockBuffers:
    """Two buffers of one block each, shared by seals and restores, and a third if it is needed.

    The third buffer of a seal is kept, that of a restore is freed when the restore ends.

    Args:
        backend: Backend that allocates the buffers.
        data_bytes: Bytes of the model file's data; no buffer needs to be larger.
        traffic: Counter of the bytes that cross between the buffers and devices.
    """

    def __init__(self, backend: Backend, data_bytes: int, traffic: Traffic | None = None) -> None:
        self.traffic = traffic or Traffic()
        self._backend = backend
        self._locked: dict[torch.device, list[object]] = {}
        nbytes = -(-max(min(MODEL_BLOCK_BYTES, data_bytes), 1) // ALIGNMENT) * ALIGNMENT
        self._buffers = [backend.allocate(nbytes) for _ in range(2)]
        self._spare: Buffer | None = None
        self._tensors = [
            torch.frombuffer(buffer.memoryview(), dtype=torch.uint8) for buffer in self._buffers
        ]

    def page_lock_for(self, devices: Iterable[torch.device]) -> BlockBuffers:
        """Page-lock the two buffers for fast copies from and to these devices; return self."""
        for device in devices:
            if device not in self._locked:
                lock_pages = boundary_of(device).lock_pages
                self._locked[device] = [lock_pages(tensor) for tensor in self._tensors]
        return self

    def for_reading(self, num_blocks: int) -> list[_Memory]:
        """Return the memory through which blocks are read: the two buffers, and a third one.

        With two buffers the drive would be idle for a while after both blocks have arrived. If
        there are only two blocks, or no memory for a third buffer, the list has two entries. The
        third buffer is freed with the list.

        Args:
            num_blocks: Number of blocks that will be read.
        """
        pairs = zip(self._buffers, self._tensors, strict=True)
        memory = [_Memory(buffer, tensor) for buffer, tensor in pairs]
        if num_blocks > len(memory):
            with suppress(MemoryError):
                buffer = self._backend.allocate(self._buffers[0].nbytes)
                tensor = torch.frombuffer(buffer.memoryview(), dtype=torch.uint8)
                locks = [boundary_of(device).lock_pages(tensor) for device in self._locked]
                memory.append(_Memory(buffer, tensor, locks))
        return memory

    @property
    def nbytes(self) -> int:
        """Total size of the buffers in bytes, without the third buffer of a restore."""
        spare = 0 if self._spare is None else self._spare.nbytes
        return sum(buffer.nbytes for buffer in self._buffers) + spare

    def get(self, index: int, nbytes: int) -> tuple[Buffer, torch.Tensor]:
        """Return a block's memory, as a buffer and as a tensor; every second block shares it."""
        return self._buffers[index % 2].slice(0, nbytes), self._tensors[index % 2][:nbytes]

    def spare(self, nbytes: int) -> Buffer:
        """Return the third buffer, separate from the other two; allocated at the first call.

        Raises:
            MemoryError: There is no memory left.
        """
        if self._spare is None:
            self._spare = self._backend.allocate(self._buffers[0].nbytes)
        return self._spare.slice(0, nbytes)


class ModelImage:
    """Live tensors, viewed as the bytes of a model file.

    Args:
        header: Header of the file, which maps tensors to bytes.
        tensors: Live tensor for each name, with the header's dtype and shape. The values of a
            tensor on a device are those that the work up to `marks` computes.
        marks: Points in the streams of the devices; None for the end of the work that is queued so
            far on the calling thread's current streams.
        traffic: Counter of the bytes that cross.
    """

    def __init__(
        self,
        header: Header,
        tensors: Mapping[str, torch.Tensor],
        marks: Marks | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        entries = [e for e in header.entries.values() if e.nbytes]
        self._starts = [e.start for e in entries]
        self._stops = [e.stop for e in entries]
        self._tensors = [tensors[e.name] for e in entries]
        self._staged: dict[int, torch.Tensor] = {}
        self._marks = marks_of(self._tensors) if marks is None else marks
        self._traffic = traffic or Traffic()
        # A tensor that was made in inference mode can be written in that mode only. A model that is
        # not trained may have such tensors.
        self._in_inference = any(t.is_inference() for t in self._tensors)
        self.data_start = header.data_start
        self.data_bytes = header.file_bytes - header.data_start

    def blocks(self) -> Iterator[tuple[int, int, int]]:
        """Yield index, first byte, and one past the last byte of every block of the data."""
        for index, start in enumerate(range(0, self.data_bytes, MODEL_BLOCK_BYTES)):
            yield index, start, min(start + MODEL_BLOCK_BYTES, self.data_bytes)

    def gather(
        self, start: int, stop: int, out: torch.Tensor, *, on_one_thread: bool = False
    ) -> None:
        """Copy a range of the data from the live tensors into `out`; complete on return.

        Args:
            start: First byte of the range.
            stop: One past the last byte.
            out: Host memory of as many bytes, dtype uint8.
            on_one_thread: Whether host memory is copied on the calling thread alone; see
                `_copy_on_one_thread`.
        """
        fetched: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for index, first, last, at in self._overlaps(start, stop):
            flat, into = self._flat(index), out[at : at + last - first]
            if is_on_device(flat):
                fetched.setdefault(flat.device, []).append((flat[first:last], into))
            elif on_one_thread:
                _copy_on_one_thread(flat[first:last], into)
            else:
                into.copy_(flat[first:last])
            if last == flat.numel():
                self._staged.pop(index, None)
        if fetched:
            self._fetch(fetched)

    def scatter(
        self, start: int, stop: int, data: torch.Tensor, *, on_one_thread: bool = False
    ) -> None:
        """Copy a range of the data into the live tensors; complete on return.

        Args:
            start: First byte of the range.
            stop: One past the last byte.
            data: Bytes of the range in host memory, dtype uint8.
            on_one_thread: As for `gather`.
        """
        with torch.inference_mode(self._in_inference), torch.no_grad():
            self._scatter(start, stop, data, on_one_thread=on_one_thread)

    def _scatter(self, start: int, stop: int, data: torch.Tensor, *, on_one_thread: bool) -> None:
        sent: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for index, first, last, at in self._overlaps(start, stop):
            flat = self._flat(index)
            copies = [(data[at : at + last - first], flat[first:last])]
            if on_one_thread and not is_on_device(flat):
                _copy_on_one_thread(*copies.pop())
            if last == flat.numel() and index in self._staged:
                tensor = self._tensors[index]
                copies.append((flat.view(tensor.dtype).view(tensor.shape), tensor.detach()))
                del self._staged[index]
            if is_on_device(flat):
                sent.setdefault(flat.device, []).extend(copies)
            else:
                for source, into in copies:
                    into.copy_(source)
        if sent:
            self._send(sent)

    def _fetch(self, copies: Mapping[torch.device, Copies]) -> None:
        """Copy from devices, and wait for the copies."""
        events = [
            (device, boundary_of(device).fetch(pairs, self._after(device)))
            for device, pairs in copies.items()
        ]
        for device, event in events:
            boundary_of(device).wait(event)
            self._traffic.fetched(sum(into.nbytes for _, into in copies[device]))

    def _send(self, copies: Mapping[torch.device, Copies]) -> None:
        """Copy to devices, and wait for the copies: their sources are about to be reused."""
        events = [
            (device, boundary_of(device).send(pairs, self._after(device)))
            for device, pairs in copies.items()
        ]
        for device, event in events:
            boundary_of(device).wait(event)
            self._traffic.sent(sum(s.nbytes for s, _ in copies[device] if not is_on_device(s)))

    def _after(self, device: torch.device) -> list[Event]:
        return [self._marks[device]] if device in self._marks else []

    def _overlaps(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        index = max(bisect_right(self._starts, start) - 1, 0)
        while index < len(self._starts) and self._starts[index] < stop:
            begin, end = self._starts[index], self._stops[index]
            first, last = max(start, begin), min(stop, end)
            if first < last:
                yield index, first - begin, last - begin, first - start
            index += 1

    def _flat(self, index: int) -> torch.Tensor:
        tensor = self._tensors[index].detach()
        # The memory of a conjugated or negated view holds other values than the view.
        if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
            return tensor.reshape(-1).view(torch.uint8)
        if index not in self._staged:
            if is_on_device(tensor):
                device = tensor.device
                flat = boundary_of(device).flatten(tensor, self._after(device))
            else:
                flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
            self._staged[index] = flat.view(torch.uint8)
        return self._staged[index]


def _copy_on_one_thread(source: torch.Tensor, into: torch.Tensor) -> None:
    """Copy host memory on the calling thread alone.

    Torch divides a large copy among its threads. If other work keeps the cores busy, waiting for
    those threads takes longer than the whole copy.

    Args:
        source: Contiguous bytes, dtype uint8.
        into: Contiguous bytes, dtype uint8; as many as those of `source`.
    """
    if type(source) is not torch.Tensor or type(into) is not torch.Tensor:
        into.copy_(source)  # a subclass need not have memory of its own
        return
    ctypes.memmove(into.data_ptr(), source.data_ptr(), source.numel())
    into[:0].copy_(source[:0])  # so that torch counts the change of a live tensor


def digest_model(image: ModelImage, buffers: BlockBuffers, context: DigestContext) -> list[str]:
    """Return the digests that `write_model` would return, without writing."""
    digests = []
    for index, start, stop in image.blocks():
        buffer, data = buffers.get(index, stop - start)
        image.gather(start, stop, data)
        digests.append(context.digest(MODEL_ARRAY, index, buffer.memoryview()))
    return digests


def read_model(
    image: ModelImage,
    file: File,
    buffers: BlockBuffers,
    context: DigestContext,
    expected: tuple[str, ...],
    known: KnownLeaves | None = None,
) -> None:
    """Read a model file's data into the live tensors, and check every block's digest.

    While a block is checked and copied, the reads of the next two are in flight. A block that is
    wrong is read a second time before an error is raised: see `second_read`.

    Args:
        image: Live tensors; overwritten.
        file: File to read.
        buffers: Blocks of memory.
        context: Store and generation of the digests.
        expected: Digest of each block.
        known: Record to which correctly read leaves are added; None to record nothing.

    Raises:
        DamagedError: Both reads of a block are wrong. Tensors before it have been overwritten.
        gds.StorageError: The file cannot be read.
    """
    blocks = list(image.blocks())
    memory = buffers.for_reading(len(blocks))
    reads: dict[int, IOFuture] = {}

    def start_read(index: int) -> None:
        """Start the read of a block, if there is such a block, into memory that is free by now."""
        if index < len(blocks):
            _, start, stop = blocks[index]
            buffer = memory[index % len(memory)].buffer.slice(0, stop - start)
            reads[index] = file.read(buffer, image.data_start + start)

    try:
        for index in range(len(memory) - 1):
            start_read(index)
        for index, start, stop in blocks:
            start_read(index + len(memory) - 1)
            reads.pop(index).result()
            whole, tensor, _ = memory[index % len(memory)]
            buffer, data = whole.slice(0, stop - start), tensor[: stop - start]
            leaves = leaf_digests(buffer.memoryview())
            found = context.digest_leaves(MODEL_ARRAY, index, leaves)
            if found != expected[index]:
                offset, nbytes = image.data_start + start, stop - start
                digest = partial(context.digest, MODEL_ARRAY, index)
                again = reread_and_check(
                    file, offset, nbytes, digest, found=found, expected=expected[index]
                )
                data = torch.frombuffer(again.memoryview(), dtype=torch.uint8)
                leaves = leaf_digests(again.memoryview())
            if known is not None:
                known.note(index, leaves)
            arrived = reads.values()
            has_caught_up = bool(arrived) and all(read.done() for read in arrived)
            image.scatter(start, stop, data, on_one_thread=not has_caught_up)
    finally:
        for read in reads.values():
            try:
                read.result()
            except OSError:
                continue  # another error is being raised already, or the read was not needed
