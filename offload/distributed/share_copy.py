"""Copies of a rank's share of the model between live tensors and the file that it is in."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final

import torch

from gds import Backend, File
from offload.checkpoint.sealed_slot import model_file
from offload.device.boundary import Marks
from offload.device.staging import Traffic
from offload.distributed.agreement.peers import Json
from offload.format.boxes import Box
from offload.format.digests import Content, DigestContext, KnownLeaves
from offload.format.layout import Layout
from offload.format.manifest import Manifest
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

Memory = Callable[[str, Box], torch.Tensor]
"""Function that returns the live memory of a box of a tensor."""

_MOST: Final = 256
"""Number of files that are remembered; each takes 8 bytes for each MiB of the share."""


@dataclass(frozen=True, slots=True)
class SharedFile:
    """The model file that all ranks write for a slot."""

    folder: str = ""
    """Name of the directory that has it, below the first directory; empty if it is not known."""

    content: Content = field(default_factory=Content)
    """Its content, as the writer has named it."""


class KnownShares:
    """What this rank knows of the model files that it has written its share of. One thread.

    The writer of the store names the content of each slot's model file, and says so when it grants
    the slot. After a seal that was aborted, or if another file has taken the place of the file, the
    name is another one. So a rank believes only what it has written under the present name.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[ModelShare, KnownLeaves]] = OrderedDict()

    def of(self, content: Content, share: ModelShare) -> KnownLeaves:
        """Return what is known of a share in a file; the caller adds what it writes, by piece."""
        if not content.name:
            return KnownLeaves(readable=False)
        found = self._known.get(content.name)
        if found is None or found[0] is not share:
            found = share, KnownLeaves(readable=content.readable)
        self._known[content.name] = found
        self._known.move_to_end(content.name)
        if len(self._known) > _MOST:
            self._known.popitem(last=False)
        return found[1]

    def forget(self, content: Content) -> None:
        """Forget a file, because a seal has failed: what was written may be in a cache only."""
        self._known.pop(content.name, None)


class ShareCopy:
    """Copy of a rank's share of the model into the model file of a slot, as a seal makes it.

    Before anything is written, digests are computed of all values that other ranks hold as well. No
    step may change one of these before. They count as the first byte of the copy.
    """

    def __init__(
        self,
        share: ModelShare,
        memory: Memory,
        file: File | None,
        backend: Backend,
        context: DigestContext,
        marks: Marks,
        traffic: Traffic,
        progress: Callable[[], None],
        digests: Callable[[], Json],
        *,
        known: KnownLeaves,
        changing: Container[str],
        forget: Callable[[], None],
        close: Callable[[], None],
    ) -> None:
        plan = SharePlan(share)
        self._share = share
        self._file = file
        self._context = context
        self._buffers = buffers_of(backend, plan.buffer_bytes, traffic)
        self._image = ShareImage(plan, _tensors_of(share, memory), marks, traffic)
        self._written: WrittenShare | None = None
        self._progress = progress
        self._digests = digests
        self._known = known
        self._changing = changing
        self.data_bytes = 1 + share.nbytes
        self.replicas: Json = []
        """Digests of the values that other ranks hold as well."""
        self.forget, self.close = forget, close

    def stop_of(self, name: str) -> int:
        """Return how much must be copied before a tensor may change."""
        return 1 + self._share.stop_of(name)

    def stops(self, layout: Layout) -> Sequence[int]:
        """Return, for each chunk, how much must be copied before it is stepped."""
        return [1 + stop for stop in self._share.model_stops(layout)]

    def write(self, copied: Callable[[int], None]) -> tuple[Sequence[str], int]:
        """Write the blocks that belong to this rank alone; `finish` writes the rest.

        Bytes that the file is known to hold are left out.
        """
        self.replicas = self._digests()
        copied(1)
        if self._file is None:
            return (), 0

        def moved(nbytes: int) -> None:
            """Tell the other ranks and the caller that bytes were copied."""
            self._progress()
            copied(1 + nbytes)

        written = self._written = write_share(
            self._image,
            self._file,
            self._buffers,
            self._context,
            self._known,
            moved,
            changing=self._changing,
        )
        return written.digests, written.written_bytes

    def is_same(self, digests: Sequence[str]) -> bool:
        """Compare the digests of all pieces, without writing."""
        return digest_share(self._image, self._buffers, self._context) == list(digests)

    def finish(self) -> tuple[ModelBox, ...]:
        """Write the rest of the share, and make it durable; the boxes have their digests.

        Call this after every rank has returned from `write`.
        """
        if self._file is None:
            return ()
        if self._written is None:
            raise RuntimeError("the share has not been written yet")
        finish_share(self._file, self._written)
        return boxes_of(self._share, self._written.digests)


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
    memory: Memory,
    backend: Backend,
    context: DigestContext,
    traffic: Traffic,
) -> bool:
    """Return whether live tensors equal a rank's share of a checkpoint, bit for bit."""
    plan = SharePlan(share)
    image = ShareImage(plan, _tensors_of(share, memory), traffic=traffic)
    digests = digest_share(image, buffers_of(backend, plan.buffer_bytes, traffic), context)
    return set(boxes) == set(boxes_of(share, digests))


def _tensors_of(share: ModelShare, memory: Memory) -> list[torch.Tensor]:
    return [memory(entry.name, entry.box) for entry in share.entries]


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
    """Load a rank's share of the model into live tensors; return the number of bytes read."""
    reading = ModelReading(
        [StoredModel(file, model_file(manifest))],
        [LiveBox(e.name, e.box, memory(e.name, e.box)) for e in share.entries],
    )
    context = DigestContext(manifest.store_id, manifest.generation)
    reading.read(buffers_of(backend, reading.buffer_bytes, traffic), context)
    return reading.num_bytes
