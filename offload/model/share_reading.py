"""Reader of boxes from model files that several ranks have written, into live tensors.

The boxes that are wanted need not be those that were written: a run may continue on another number
of ranks. Each piece of a written box that holds a wanted element is read as a whole, and is checked
against its digest before any of it reaches a live tensor. If every rank wants the boxes that it
wrote, each byte of the file is read by one rank, once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from gds import ALIGNMENT, Buffer, File, IOFuture
from offload.checkpoint.second_read import reread_and_check
from offload.device.boundary import Event, is_on_device, marks_of
from offload.errors import CheckpointError, MismatchError
from offload.format.boxes import Box, cut_range, uncovered
from offload.format.digests import DigestContext, KnownLeaves, leaf_digests
from offload.format.shares.model_blocks import Batch, capacity_for, cut_batches
from offload.format.shares.model_shares import ModelShare, ShareEntry, SharePiece, TensorBox
from offload.model.live_boxes import LiveBox
from offload.model.model_file import BlockBuffers
from offload.model.tensor_image import bytes_of, copy_on_one_thread, flattened, send
from offload.update.dtypes import DTYPE_CODES, DTYPES


@dataclass(frozen=True, slots=True, eq=False)
class StoredShare:
    """Boxes that a rank has written to a file."""

    share: ModelShare
    file: File

    digests: Sequence[str]
    """Digest of each piece of the share, from the checkpoint."""

    known: KnownLeaves | None = None
    """Record to which correctly read content is added, by piece; None to record nothing."""


class _Work(NamedTuple):
    """A batch of pieces of one file."""

    stored: StoredShare

    numbers: Sequence[int]
    """Indices, among the share's pieces, of the pieces that the batch was cut from."""

    batch: Batch


class ShareReading:
    """Boxes to read, with the pieces of files that hold them.

    Args:
        stored: What all ranks wrote.
        wanted: Boxes that this rank needs. Boxes without elements are ignored.

    Raises:
        MismatchError: A wanted box differs from what was written in name, dtype or shape, or has
            elements that nobody wrote; names it.
        CheckpointError: There is not one digest for each piece of a share.
    """

    def __init__(self, stored: Sequence[StoredShare], wanted: Sequence[LiveBox]) -> None:
        self._wanted: dict[str, list[LiveBox]] = {}
        for want in wanted:
            if want.box.num_elements:
                self._wanted.setdefault(want.name, []).append(want)
        for source in stored:
            if len(source.digests) != len(source.share.pieces):
                raise CheckpointError(
                    f"{source.file.path}: {len(source.digests)} digests for the "
                    f"{len(source.share.pieces)} pieces of its boxes"
                )
        by_name: dict[str, list[tuple[int, ShareEntry]]] = {}
        for rank, source in enumerate(stored):
            for entry in source.share.entries:
                by_name.setdefault(entry.name, []).append((rank, entry))
        for name, wants in self._wanted.items():
            for want in wants:
                require_stored(by_name.get(name, ()), want)
        self._work = list(self._batches(stored))

    def _batches(self, stored: Sequence[StoredShare]) -> Iterator[_Work]:
        boxes = [TensorBox(w.name, w.box) for wants in self._wanted.values() for w in wants]
        for source in stored:
            numbers = source.share.pieces_with(boxes)
            pieces = [source.share.pieces[number] for number in numbers]
            for batch in cut_batches(pieces, capacity_for(source.share.piece_bytes)):
                yield _Work(source, numbers, batch)

    @property
    def buffer_bytes(self) -> int:
        """Size of the memory that a batch needs, in bytes."""
        return max((work.batch.nbytes for work in self._work), default=ALIGNMENT)

    @property
    def num_bytes(self) -> int:
        """Number of bytes that are read."""
        return sum(segment.nbytes for work in self._work for segment in work.batch.segments)

    def read(self, buffers: BlockBuffers, context: DigestContext) -> None:
        """Read the boxes into their live tensors, and check every piece that holds some of them.

        While a batch is checked and copied, the reads of the next two are in flight. A piece that
        is wrong is read a second time before an error is raised: see `second_read`.

        Args:
            buffers: Blocks of memory of at least `buffer_bytes` each.
            context: Store and generation of the digests.

        Raises:
            DamagedError: Both reads of a piece are wrong. Other live tensors may have been
                overwritten, but no element has a value from a damaged piece.
            gds.StorageError: A file cannot be read.
        """
        memory = buffers.for_reading(len(self._work))
        reads: dict[int, list[IOFuture]] = {}
        placer = Placer(self._wanted, buffers)

        def start_reads(index: int) -> None:
            """Begin to read the segments of a batch, if there is one with this index."""
            if index < len(self._work):
                started = reads[index] = []
                work, buffer = self._work[index], memory[index % len(memory)].buffer
                for segment in work.batch.segments:
                    into = buffer.slice(segment.at, segment.nbytes)
                    started.append(work.stored.file.read(into, segment.start))

        try:
            for index in range(len(memory) - 1):
                start_reads(index)
            for index, work in enumerate(self._work):
                start_reads(index + len(memory) - 1)
                for read in reads[index]:
                    read.result()
                del reads[index]
                buffer, tensor, _ = memory[index % len(memory)]
                with placer:
                    for placed in work.batch.pieces:
                        number = work.numbers[placed.index]
                        piece = work.stored.share.pieces[number]
                        data = tensor[placed.at : placed.at + piece.nbytes]
                        held = buffer.slice(placed.at, piece.nbytes)
                        data = _checked(work.stored, number, held, data, context)
                        placer.place(work.stored.share.entries[piece.entry], piece, data)
        finally:
            for each in reads.values():
                for read in each:
                    try:
                        read.result()
                    except OSError:
                        continue  # another error is being raised already


class Placer:
    """Copies pieces into live tensors. Copies to devices are complete when its block ends."""

    def __init__(self, wanted: dict[str, list[LiveBox]], buffers: BlockBuffers) -> None:
        tensors = [want.tensor for wants in wanted.values() for want in wants]
        self._wanted = wanted
        self._traffic = buffers.traffic
        self._marks = marks_of(tensors)
        self._flattened: dict[torch.device, Event] = {}
        self._in_inference = any(tensor.is_inference() for tensor in tensors)
        self._sent: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def __enter__(self) -> None:
        self._sent = {}

    def __exit__(self, *_: object) -> None:
        sent, self._sent = self._sent, {}
        if sent:
            with torch.inference_mode(self._in_inference), torch.no_grad():
                send(sent, (self._marks, self._flattened), self._traffic)

    def place(self, entry: ShareEntry, piece: SharePiece, data: torch.Tensor) -> None:
        """Copy the elements of a piece that are wanted.

        Args:
            entry: Box that was written.
            piece: Piece of the box.
            data: Bytes of the piece in host memory, which must not change before the block ends.
        """
        dtype = DTYPES[entry.dtype]
        first = (piece.start - entry.start) // dtype.itemsize
        last = first + piece.nbytes // dtype.itemsize
        if data.storage_offset() % dtype.itemsize:
            data = data.clone()  # a file's tensors need not be aligned to their elements
        values = data.view(dtype)
        with torch.inference_mode(self._in_inference), torch.no_grad():
            done = 0
            for part in cut_range(entry.box.sizes, first, last):
                flat = values[done : done + part.num_elements]
                done += part.num_elements
                held = Box(_sum(part.offsets, entry.box.offsets), part.sizes)
                for want in self._wanted[entry.name]:
                    common = held.intersection(want.box)
                    if common is not None:
                        source = flat.view(part.sizes)[_within(common, held).slices]
                        into = want.tensor.detach()[_within(common, want.box).slices]
                        self._copy(source, into)

    def _copy(self, source: torch.Tensor, into: torch.Tensor) -> None:
        if is_on_device(into):
            device, source = into.device, source.contiguous()
            pairs = self._sent.setdefault(device, [])
            if not _is_plain(into):  # only plain memory crosses to a device
                after = [self._marks[device]] if device in self._marks else []
                flat, self._flattened[device] = flattened(into, after)
                pairs.append((source, flat.view(into.shape)))
                source = flat.view(into.shape)
            pairs.append((source, into))
        elif source.is_contiguous() and _is_plain(into):
            copy_on_one_thread(bytes_of(source), bytes_of(into))
        else:
            into.copy_(source)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the memory of a tensor is its values in their order."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def _sum(left: Sequence[int], right: Sequence[int]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip(left, right, strict=True))


def _within(part: Box, box: Box) -> Box:
    """Return a part of a box, counted from the box's own offsets."""
    offsets = tuple(p - o for p, o in zip(part.offsets, box.offsets, strict=True))
    return Box(offsets, part.sizes)


def _checked(
    stored: StoredShare,
    number: int,
    buffer: Buffer,
    data: torch.Tensor,
    context: DigestContext,
) -> torch.Tensor:
    """Return the bytes of a piece, from a second read if those in memory are wrong."""
    piece = stored.share.pieces[number]
    array, expected = stored.share.entries[piece.entry].digest_array, stored.digests[number]
    leaves = leaf_digests(buffer.memoryview())
    found = context.digest_leaves(array, piece.number, leaves)
    if found != expected:
        digest = partial(context.digest, array, piece.number)
        again = reread_and_check(
            stored.file, piece.start, piece.nbytes, digest, found=found, expected=expected
        )
        data = torch.frombuffer(again.memoryview(), dtype=torch.uint8)
        leaves = leaf_digests(again.memoryview())
    if stored.known is not None:
        stored.known.note(number, leaves)
    return data


def require_stored(written: Sequence[tuple[int, ShareEntry]], want: LiveBox) -> None:
    """Check that every element of a wanted box was written, with the dtype of its live tensor."""
    what = f"{want.box.notation()} of {want.name!r}"
    dtype, sizes = DTYPE_CODES.get(want.tensor.dtype), tuple(want.tensor.shape)
    if sizes != want.box.sizes:
        raise MismatchError(f"{what}: the live tensor's shape is {list(sizes)}")
    parts = []
    for rank, entry in written:
        if entry.dtype != dtype or not want.box.fits(entry.cut.shape):
            raise MismatchError(
                f"{what} is {want.tensor.dtype} in the model, but the checkpoint's tensor is "
                f"{entry.dtype} with shape {list(entry.cut.shape)}: build the model as it was "
                "when the checkpoint was made"
            )
        common = entry.box.intersection(want.box)
        if common is not None:
            parts.append((rank, _within(common, want.box)))
    for box, ranks in uncovered(sizes, parts):
        held = Box(_sum(box.offsets, want.box.offsets), box.sizes)
        raise MismatchError(
            f"{held.notation()} of {want.name!r} was written {len(ranks)} times by the ranks of "
            "the checkpoint, expected once: pass what all ranks have written"
        )
