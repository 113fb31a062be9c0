"""Copies of a rank's share of the model between live tensors and a common ``model.safetensors``."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from itertools import groupby

import torch

from gds import Backend, File
from offload.checkpoint.sealed_ranges import model_file
from offload.device.boundary import Marks
from offload.device.staging import Traffic
from offload.distributed.agreement.messages import Json
from offload.format.boxes import Box
from offload.format.digests import DigestContext, KnownLeaves
from offload.format.layout import Layout
from offload.format.manifest import Manifest
from offload.format.shares.file_shares import FileShare
from offload.format.shares.model_blocks import SharePlan
from offload.format.shares.model_shares import ModelShare
from offload.format.shares.owners import ModelBox
from offload.model.model_file import BlockBuffers
from offload.model.model_reading import LiveBox, ModelReading, StoredModel
from offload.model.model_sharing import (
    ShareImage,
    WrittenShare,
    digest_share,
    finish_share,
    write_share,
)
from offload.model.scattered_sharing import (
    ScatteredImage,
    digest_rows,
    is_same_scattered,
    write_scattered,
)

Memory = Callable[[str, Box], torch.Tensor]
"""Function that returns the live memory of a box of a tensor."""


class ShareCopy:
    """Copy of a rank's share of the model into the model file of a slot.

    Args:
        share: What the rank writes.
        memory: Live memory of a box of a tensor, captured.
        file: Model file of the slot, open for this rank alone.
        backend: Backend that allocates the memory for copying.
        context: Store and generation of the digests.
        marks: Positions in the streams of devices.
        traffic: Counter of the bytes that cross to the host.
        progress: Function that tells the other ranks that this one makes progress.
        close: Function that closes the file.
        known: Known content of the share in the file, by piece.
        changing: Names of tensors that steps change; they are never read back for comparison.
        forget: Function that records that the content of the file is unknown.
    """

    def __init__(
        self,
        share: FileShare,
        memory: Memory,
        file: File,
        backend: Backend,
        context: DigestContext,
        marks: Marks,
        traffic: Traffic,
        progress: Callable[[], None],
        close: Callable[[], None],
        *,
        known: KnownLeaves,
        changing: Container[str],
        forget: Callable[[], None],
    ) -> None:
        plan = SharePlan(share.copied)
        self.share = share
        self._file = file
        self._context = context
        self._buffers = buffers_of(backend, plan.buffer_bytes, traffic)
        self._image = ShareImage(plan, _tensors_of(share.copied, memory), marks, traffic)
        self._scattered = ScatteredImage(
            share.scattered, _scattered_of(share, memory), marks, traffic
        )
        self._written: WrittenShare | None = None
        self._progress = progress
        self._known = known
        self._changing = changing
        self.close = close
        """Function that closes the file, when the seal has ended."""
        self.forget = forget
        """Function that records that the content of the file is unknown: the seal has failed."""

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
        """Write the blocks that belong to this rank alone; `finish` writes the rest.

        Bytes that the file is known to hold are left out. Scattered boxes are always written: the
        digests of their rows are computed from the file, and must be of what was in live memory.
        """

        def moved(nbytes: int) -> None:
            """Tell the other ranks and the caller that bytes were copied."""
            self._progress()
            copied(nbytes)

        written = self._written = write_share(
            self._image,
            self._file,
            self._buffers,
            self._context,
            self._known,
            moved,
            changing=self._changing,
            through_cache=self.share.through_cache,
        )
        num_copied = self.share.copied.nbytes
        scattered = write_scattered(
            self._scattered, self._file, lambda nbytes: moved(num_copied + nbytes)
        )
        return written.digests, written.written_bytes + scattered

    def is_same(self, digests: Sequence[str]) -> bool:
        """Compare the digests of all pieces, without writing. Scattered boxes are left out."""
        return digest_share(self._image, self._buffers, self._context) == list(digests)

    def finish(self) -> tuple[ModelBox, ...]:
        """Write the rest of the share, and make it durable; the boxes have their digests.

        Call this after every rank has returned from `write`.

        Raises:
            gds.StorageError: A write or the sync failed.
        """
        if self._written is None:
            raise RuntimeError("the share has not been written yet")
        rows = self.share.rows
        of_rows = digest_rows(rows, self._file, self._context, self._progress)
        finish_share(self._file, self._written)
        boxes = boxes_of(self.share.copied, self._written.digests)
        return (*boxes, *boxes_of(rows, of_rows))


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

    def is_same(self, digests: Sequence[str]) -> bool:
        """Return True: nothing was copied."""
        del digests
        return True

    def finish(self) -> tuple[ModelBox, ...]:
        """Return no box."""
        return ()

    def forget(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class ComparedCopy:
    """Copy of a rank's share, after digests of all values that other ranks hold as well.

    A step may change none of these values before the digests have been computed.

    Args:
        copy: The copy.
        digests: Function that computes the digests.
        forget: Function that records that the values may differ: the seal has failed.
    """

    def __init__(
        self,
        copy: ShareCopy | NoCopy,
        digests: Callable[[], Json],
        forget: Callable[[], None],
    ) -> None:
        self._copy = copy
        self._digests = digests
        self._forget = forget
        self.data_bytes = 1 + copy.data_bytes
        """Size of the share in bytes, and one more for the digests."""
        self.replicas: Json = []
        """The digests."""
        self.finish, self.close = copy.finish, copy.close

    def stop_of(self, name: str) -> int:
        """Return how much must be done before a tensor may change."""
        return 1 + self._copy.stop_of(name)

    def stops(self, layout: Layout) -> Sequence[int]:
        """Return, for each chunk, how much must be done before it is stepped."""
        return [1 + stop for stop in self._copy.stops(layout)]

    def write(self, copied: Callable[[int], None]) -> tuple[Sequence[str], int]:
        """Compute the digests, and write the blocks that belong to this rank alone."""
        self.replicas = self._digests()
        copied(1)
        return self._copy.write(lambda nbytes: copied(1 + nbytes))

    def is_same(self, digests: Sequence[str]) -> bool:
        """Return whether the share has the values still whose digests `write` has returned."""
        return self._copy.is_same(digests)

    def forget(self) -> None:
        """Record that the content of the file is unknown: the seal has failed."""
        self._forget()
        self._copy.forget()


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
    share: FileShare,
    boxes: Sequence[ModelBox],
    memory: Memory,
    file: File,
    backend: Backend,
    context: DigestContext,
    traffic: Traffic,
) -> bool:
    """Return whether live tensors equal a rank's share of a checkpoint, bit for bit."""
    plan = SharePlan(share.copied)
    image = ShareImage(plan, _tensors_of(share.copied, memory), traffic=traffic)
    digests = digest_share(image, buffers_of(backend, plan.buffer_bytes, traffic), context)
    written = {(one.name, one.box): one for one in boxes}
    wanted = {(entry.name, entry.box) for entry in share.digested.entries}
    if wanted != written.keys() or any(
        written[one.name, one.box] != one for one in boxes_of(share.copied, digests)
    ):
        return False
    scattered = ScatteredImage(share.scattered, _scattered_of(share, memory), traffic=traffic)
    return is_same_scattered(scattered, file)


def _tensors_of(share: ModelShare, memory: Memory) -> list[torch.Tensor]:
    return [memory(entry.name, entry.box) for entry in share.entries]


def _scattered_of(share: FileShare, memory: Memory) -> list[torch.Tensor]:
    return [memory(one.name, one.cut.box) for one in share.scattered]


def is_own_share(share: ModelShare, boxes: Sequence[ModelBox]) -> bool:
    """Return whether boxes with digests are those of a share."""
    wanted = {(entry.name, entry.box) for entry in share.entries}
    return wanted == {(one.name, one.box) for one in boxes if one.box.num_elements}


def load_share(
    share: ModelShare,
    manifest: Manifest,
    memory: Memory,
    file: File,
    backend: Backend,
    traffic: Traffic,
) -> int:
    """Load a rank's share of the model into live tensors; return the number of bytes read.

    Args:
        share: What the rank has written.
        manifest: Manifest of the checkpoint, as the rank has it.
        memory: Live memory of a box of a tensor.
        file: File with the share.
        backend: Backend that allocates the memory for copying.
        traffic: Counter of the bytes that cross from the host.
    """
    reading = ModelReading(
        [StoredModel(file, model_file(manifest))],
        [LiveBox(e.name, e.box, memory(e.name, e.box)) for e in share.entries],
    )
    context = DigestContext(manifest.store_id, manifest.generation)
    reading.read(buffers_of(backend, reading.buffer_bytes, traffic), context)
    return reading.num_bytes
