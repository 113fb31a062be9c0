"""The part of a frame that holds a chunk's parameters as they are in ``model.safetensors``.

With ``Options(parameters="drive")`` a step writes new parameters in the same pass as the new state,
into the model file of the slot that it writes. A seal then compares the live model with the digests
of what has been written, and writes only what differs.

That is as safe as writing the state: the slot that a step writes is no checkpoint. Nobody reads its
model file before a seal has made all of it durable, with its digests in the manifest. Whether bytes
can be left out of a seal is known from `KnownLeaves` alone. A leaf of the file is unknown from the
moment before a write to it begins, and is known again when all writes of its chunk have succeeded:
a pass that fails, and a write that fails or was never started, leave unknown leaves, which the next
seal reads back or writes.

A leaf that several chunks share stays unknown. The seal reads it back, which takes at most 1 MiB
for each chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gds import Buffer, IOFuture
from offload.checkpoint.sealed_slot import SlotFiles
from offload.format.chunk_plan import Piece
from offload.format.digests import LEAF_BYTES, KnownLeaves, Run, leaf_digest
from offload.format.model_places import ModelPlaces, ModelRange
from offload.store.slots.slot import OpenSlot
from offload.update.dtypes import DTYPES


class ModelPart:
    """Memory for the ranges of one chunk, and the writes that use it.

    Args:
        places: Places of all chunks in the model file.
        buffer: Host memory of at least `ModelPlaces.memory_bytes`.
        memory: The same memory as bytes.
    """

    def __init__(self, places: ModelPlaces, buffer: Buffer, memory: torch.Tensor) -> None:
        self._places = places
        self._buffer = buffer
        self._memory = memory
        self._started: tuple[KnownLeaves, list[tuple[int, list[bytes]]]] | None = None
        """Digests of the leaves that are being written, after the number of the first of them."""

    def values(self, chunk: int) -> list[tuple[Sequence[Piece], torch.Tensor]]:
        """Return memory for the new values of a chunk's pieces, range by range, flat."""
        return [
            (one.pieces, self._bytes(one).view(DTYPES[one.dtype]))
            for one in self._places.ranges[chunk]
        ]

    def read(self, chunk: int, source: SlotFiles, futures: list[IOFuture]) -> None:
        """Start reading a chunk's values from a slot's model file; the slot's layout may differ.

        Args:
            chunk: Index of the chunk.
            source: Slot that has the values. Parameters that it lacks are left out.
            futures: List to which each read is added as soon as it has been started.
        """
        header = source.layout.model_header
        for one in self._places.ranges[chunk]:
            parts: list[list[int]] = []
            at = one.at
            for piece in one.pieces:
                size = DTYPES[one.dtype].itemsize
                nbytes = (piece.stop - piece.start) * size
                entry = header.entries.get(self._places.name_of(piece))
                if entry is not None:
                    start = header.data_start + entry.start + piece.start * size
                    if parts and parts[-1][1] == start and parts[-1][2] == at:
                        parts[-1][1:] = start + nbytes, at + nbytes
                    else:
                        parts.append([start, start + nbytes, at + nbytes])
                at += nbytes
            for start, stop, end in parts:
                into = self._buffer.slice(end - (stop - start), stop - start)
                futures.append(source.model.read(into, start))

    def write(self, chunk: int, slot: OpenSlot, run: Run, futures: list[IOFuture]) -> None:
        """Digest a chunk's values, and start writing them to a slot's model file.

        Args:
            chunk: Index of the chunk whose values are in memory.
            slot: Slot to write.
            run: Runner that computes the digests on several threads.
            futures: List to which each write is added as soon as it has been started.

        Raises:
            gds.StorageError: A write could not be started.
        """
        ranges, known = self._places.ranges[chunk], slot.model_leaves
        whole = [self._leaves(one) for one in ranges]
        digests = iter(run(leaf_digest, [leaf for _, leaves in whole for leaf in leaves]))
        noted = [(first, [next(digests) for _ in leaves]) for first, leaves in whole]
        for one in ranges:
            first, last = one.start // LEAF_BYTES, -(-one.stop // LEAF_BYTES)
            known.note_leaves(first, [None] * (last - first))
        for one in ranges:
            part = self._buffer.slice(one.at, one.nbytes)
            futures.append(slot.model.write(part, self._places.data_start + one.start))
        self._started = known, noted

    def writes_ended(self, *, succeeded: bool) -> None:
        """Record what the file holds now, if all writes of the chunk have been started."""
        started, self._started = self._started, None
        if started is not None and succeeded:
            known, noted = started
            for first, digests in noted:
                known.note_leaves(first, digests)

    def _bytes(self, one: ModelRange) -> torch.Tensor:
        return self._memory[one.at : one.at + one.nbytes]

    def _leaves(self, one: ModelRange) -> tuple[int, list[memoryview]]:
        """Return the number of the first leaf that is wholly in a range, and all such leaves."""
        first, last = -(-one.start // LEAF_BYTES), one.stop // LEAF_BYTES
        if one.stop == self._places.data_bytes:
            last = -(-one.stop // LEAF_BYTES)  # the last leaf of the file is as short as it is
        data = self._bytes(one).numpy().data
        edges = [n * LEAF_BYTES - one.start for n in range(first, last)]
        return first, [data[at : at + LEAF_BYTES] for at in edges]
