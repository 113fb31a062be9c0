"""Copies of a rank's share of the model between live tensors and a common ``model.safetensors``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

import torch

from gds import Backend, File
from offload.device.boundary import Marks
from offload.device.staging import Traffic
from offload.errors import MismatchError
from offload.format.digests import DigestContext
from offload.format.known_leaves import KnownLeaves
from offload.format.layout import Layout
from offload.format.shares.model_blocks import SharePlan
from offload.format.shares.model_shares import ModelShare
from offload.format.shares.owners import ModelBox
from offload.model.live_boxes import LiveBox
from offload.model.model_file import BlockBuffers
from offload.model.model_sharing import (
    ShareImage,
    WrittenShare,
    digest_share,
    finish_share,
    write_share,
)
from offload.model.share_reading import ShareReading, StoredShare


class ShareCopy:
    """Copy of a rank's share of the model into the model file of a slot.

    Args:
        share: Boxes that the rank writes.
        tensors: Live memory of each box.
        file: Model file of the slot, open for this rank alone.
        backend: Backend that allocates the memory for copying.
        context: Store and generation of the digests.
        marks: Positions in the streams of devices.
        traffic: Counter of the bytes that cross to the host.
        progress: Function that tells the other ranks that this one makes progress.
        close: Function that closes the file.
    """

    def __init__(
        self,
        share: ModelShare,
        tensors: Sequence[torch.Tensor],
        file: File,
        backend: Backend,
        context: DigestContext,
        marks: Marks,
        traffic: Traffic,
        progress: Callable[[], None],
        close: Callable[[], None],
    ) -> None:
        plan = SharePlan(share)
        self.share = share
        self._file = file
        self._context = context
        self._buffers = buffers_of(backend, plan.buffer_bytes, traffic)
        self._image = ShareImage(plan, tensors, marks, traffic)
        self._written: WrittenShare | None = None
        self._progress = progress
        self.close = close
        """Function that closes the file, when the seal has ended."""

    @property
    def data_bytes(self) -> int:
        """Size of the share in bytes."""
        return self.share.nbytes

    def stop_of(self, name: str) -> int:
        """Return how much of the share must be copied before a tensor may change."""
        return self.share.stop_of(name)

    def stops(self, layout: Layout) -> Sequence[int]:
        """Return, for each chunk, how much of the share must be copied before it is stepped."""
        return self.share.model_stops(layout)

    def write(self, copied: Callable[[int], None]) -> tuple[Sequence[str], int]:
        """Write the blocks that belong to this rank alone; `finish` writes the rest."""

        def moved(nbytes: int) -> None:
            self._progress()
            copied(nbytes)

        known = KnownLeaves(readable=False)
        written = self._written = write_share(
            self._image, self._file, self._buffers, self._context, known, moved
        )
        return written.digests, written.written_bytes

    def finish(self) -> tuple[ModelBox, ...]:
        """Write the rest of the share, and make it durable; the boxes have their digests.

        Call this after every rank has returned from `write`.

        Raises:
            gds.StorageError: A write or the sync failed.
        """
        if self._written is None:
            raise RuntimeError("the share has not been written yet")
        finish_share(self._file, self._written)
        return boxes_of(self.share, self._written.digests)

    def forget(self) -> None:
        """Do nothing: nothing is remembered of a file."""


class NoCopy:
    """Copy of the share of a rank that writes nothing of the model; see `ShareCopy`."""

    data_bytes = 0

    def stop_of(self, name: str) -> int:
        """Return 0: nothing is copied."""
        del name
        return 0

    def stops(self, layout: Layout) -> Sequence[int]:
        """Return 0 for each chunk."""
        return (0,) * layout.num_chunks

    def write(self, copied: Callable[[int], None]) -> tuple[Sequence[str], int]:
        """Write nothing."""
        del copied
        return (), 0

    def finish(self) -> tuple[ModelBox, ...]:
        """Return no box."""
        return ()

    def forget(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def buffers_of(backend: Backend, nbytes: int, traffic: Traffic) -> BlockBuffers:
    """Return memory for copying batches of a size."""
    return BlockBuffers(backend, nbytes, traffic, block_bytes=nbytes)


def boxes_of(share: ModelShare, digests: Iterable[str]) -> tuple[ModelBox, ...]:
    """Return the boxes of a share with the digests of their pieces."""
    pairs = zip(share.pieces, digests, strict=True)
    by_entry = {
        entry: tuple(digest for _, digest in found)
        for entry, found in groupby(pairs, key=lambda pair: pair[0].entry)
    }
    return tuple(
        ModelBox(entry.name, entry.box, by_entry[index])
        for index, entry in enumerate(share.entries)
    )


def is_same_share(
    share: ModelShare,
    boxes: Sequence[ModelBox],
    tensors: Sequence[torch.Tensor],
    backend: Backend,
    context: DigestContext,
    traffic: Traffic,
) -> bool:
    """Return whether live tensors equal a rank's share of a checkpoint, bit for bit.

    Args:
        share: Boxes that the rank writes.
        boxes: Boxes that the rank has written, with their digests.
        tensors: Live memory of each box.
        backend: Backend that allocates the memory for copying.
        context: Store and generation of the digests.
        traffic: Counter of the bytes that cross to the host.
    """
    plan = SharePlan(share)
    image = ShareImage(plan, tensors, traffic=traffic)
    digests = digest_share(image, buffers_of(backend, plan.buffer_bytes, traffic), context)
    return boxes_of(share, digests) == tuple(boxes)


def load_share(
    share: ModelShare,
    boxes: Sequence[ModelBox],
    tensors: Sequence[torch.Tensor],
    file: File,
    backend: Backend,
    context: DigestContext,
    traffic: Traffic,
) -> int:
    """Load a rank's share of the model into live tensors; return the number of bytes read.

    Args:
        share: Boxes that the rank reads.
        boxes: Boxes that the rank with the same number has written, with their digests.
        tensors: Live memory of each box.
        file: Model file of the checkpoint.
        backend: Backend that allocates the memory for copying.
        context: Store and generation of the digests.
        traffic: Counter of the bytes that cross to devices.

    Raises:
        MismatchError: The boxes are not those of the share.
        DamagedError: The file is damaged.
        gds.StorageError: The file cannot be read.
    """
    written = {(one.name, one.box): one for one in boxes}
    wanted = {(entry.name, entry.box) for entry in share.entries}
    different = sorted(f"{name}{box.notation()}" for name, box in wanted ^ written.keys())
    if different:
        raise MismatchError(
            f"{file.path}: the ranks that made the checkpoint had divided the model otherwise "
            f"({different[0]}, and {len(different) - 1} more boxes differ): resume with as many "
            "ranks as it was made with, and the same sharding"
        )
    digests = [d for entry in share.entries for d in written[entry.name, entry.box].digests]
    pairs = zip(share.entries, tensors, strict=True)
    reading = ShareReading(
        [StoredShare(share, file, digests)],
        [LiveBox(entry.name, entry.box, tensor) for entry, tensor in pairs],
    )
    reading.read(buffers_of(backend, reading.buffer_bytes, traffic), context)
    return reading.num_bytes
