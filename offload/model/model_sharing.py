"""Writer of one rank's share of a model file that several ranks write together.

`write_share` copies the live tensors batch by batch and writes the blocks whose bytes all belong to
the rank, directly to the device. It returns the edges: bytes in blocks that the rank shares with
others. `finish_share` writes the edges through the page cache, and makes the file durable.

They are two calls because a direct write of one rank and a buffered write of another one may touch
the same unit of the page cache at the same time, if another program has read the file and the cache
has kept a unit of several blocks. The kernel then makes the next sync fail. If all ranks have
returned from `write_share` before one of them calls `finish_share`, this cannot happen.

A rank leaves out content that it has written to the file before, leaf by leaf, as a single process
does. What an earlier process left in the file is read back if no step changes it, compared, and
written only if it differs.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from gds import ALIGNMENT, File, IOFuture
from offload.device.boundary import Marks
from offload.device.staging import Traffic
from offload.errors import MismatchError
from offload.format.digests import LEAF_BYTES, DigestContext, KnownLeaves, leaf_digests
from offload.format.shares.model_blocks import (
    Batch,
    PlacedPiece,
    Range,
    Segment,
    SharePlan,
    writes_of,
)
from offload.format.shares.model_shares import ModelShare, SharePiece
from offload.model.model_file import BlockBuffers, ReadBack, has_failed
from offload.model.tensor_image import TensorImage
from offload.update.dtypes import DTYPE_CODES

_DIGEST_BYTES = 8


class ShareImage(TensorImage):
    """Live boxes of one rank, viewed as the bytes of its share.

    Args:
        plan: Share, with its batches.
        tensors: Live tensor of each entry of the share, with the dtype of the entry and the shape
            of its box.
        marks: Points in the streams of the devices; None for the end of the work that is queued so
            far on the calling thread's current streams.
        traffic: Counter of the bytes that cross.

    Raises:
        MismatchError: A tensor has another dtype or shape than its entry; names it.
    """

    def __init__(
        self,
        plan: SharePlan,
        tensors: Sequence[torch.Tensor],
        marks: Marks | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        for entry, tensor in zip(plan.share.entries, tensors, strict=True):
            dtype = DTYPE_CODES.get(tensor.dtype)
            if (dtype, tuple(tensor.shape)) != (entry.dtype, entry.box.sizes):
                raise MismatchError(
                    f"the box {entry.box.notation()} of {entry.name!r} is {tensor.dtype} "
                    f"{list(tensor.shape)} now, expected {entry.dtype} {list(entry.box.sizes)}: "
                    "the parameter has been replaced or divided anew since the store was laid out"
                )
        names = [entry.name for entry in plan.share.entries]
        super().__init__(tensors, marks, traffic, names=names)
        self.plan = plan


@dataclass(slots=True)
class WrittenShare:
    """Result of writing the blocks of a share."""

    digests: list[str]
    """Digest of each piece of the share."""

    edges: list[tuple[int, bytes]] = field(default_factory=list)
    """Bytes that `finish_share` writes, each with its place in bytes from the start of the file."""

    written_bytes: int = 0
    """Number of bytes in blocks that were written, and in the edges."""

    read_bytes: int = 0
    """Number of bytes that were read back for comparison."""


def write_share(
    image: ShareImage,
    file: File,
    buffers: BlockBuffers,
    context: DigestContext,
    known: KnownLeaves,
    copied: Callable[[int], None],
    *,
    changing: Container[str] | None = None,
) -> WrittenShare:
    """Write the blocks of a share whose bytes all belong to it. The file is not synced.

    No transfer is in progress when this returns or raises.

    Args:
        image: Live tensors.
        file: Open file of this rank alone, on the same file as those of the other ranks.
        buffers: Two blocks of memory of at least `SharePlan.buffer_bytes` each.
        context: Store and generation of the digests.
        known: Known content of the share in the file, by piece; updated. It must be a new one if
            the share has changed, or if another file has taken the place of the file. If this
            function or `finish_share` raises, it is wrong, and the caller must forget it.
        copied: Function that is called after each batch with the number of bytes of the share that
            have been copied so far. Live tensors may change as far as `ModelShare.stop_of` allows.
        changing: Names of tensors that are never read back, because they change; None for all.

    Returns:
        Digests, and the edges that are still to be written by `finish_share`.

    Raises:
        gds.StorageError: A write failed.
    """
    found = WrittenShare([])
    writes: dict[int, list[IOFuture]] = {}
    changed: list[Range] = []
    memory = torch.empty(0, dtype=torch.uint8, device="cpu")
    end = 0
    back = ReadBack(file, buffers)
    try:
        for index, batch in enumerate(image.plan.batches):
            for write in writes.get(index - 2, []):
                write.result()
            writes.pop(index - 2, None)
            asked = _unknown(image.plan.share, batch, known, changing)
            if asked:
                back.start(batch.nbytes, _blocks_of(image.plan.share, asked, file.size_bytes))
            handed_over = writes.values()
            has_caught_up = bool(handed_over) and all(w.done() for ws in handed_over for w in ws)
            previous, (buffer, memory) = memory, buffers.get(index, batch.nbytes)
            _carry(batch.segments[0], previous[:end], memory)
            _gather(image, batch, memory, on_one_thread=not has_caught_up)
            end = batch.segments[-1].at + batch.segments[-1].nbytes
            copied(batch.position)
            view = buffer.memoryview()
            first, _ = batch.segments[0].written
            changed = [part for part in changed if part[1] > first]
            held = _held(image.plan.share, asked, list(back.take()))
            found.read_bytes += sum(image.plan.share.pieces[number].nbytes for number in held)
            for number, leaves in _digested(image.plan.share, batch, view, context, found.digests):
                before = held.get(number, known.of(number))
                changed += _changed(image.plan.share.pieces[number], leaves, before)
                known.note(number, leaves)
            writes[index] = []
            for segment, part in zip(
                batch.segments, _divided(changed, batch.segments), strict=True
            ):
                wanted = writes_of(segment, part)
                for start, stop in wanted.blocks:
                    block = buffer.slice(segment.at + start - segment.start, stop - start)
                    writes[index].append(file.write(block, start))
                    found.written_bytes += stop - start
                for start, stop in wanted.edges:
                    at = segment.at + start - segment.start
                    found.edges.append((start, bytes(view[at : at + stop - start])))
                    found.written_bytes += stop - start
        for each in writes.values():
            for write in each:
                write.result()
    finally:
        for each in writes.values():
            for write in each:
                has_failed(write)
        back.wait()
    return found


def finish_share(file: File, written: WrittenShare) -> None:
    """Write the edges of a share, and make all that the rank has written durable.

    Call this before the rank reports its part of a seal, best after all ranks have returned from
    `write_share`. A rank without bytes in the file calls it as well: if no rank has written after
    its sync, the whole file is durable.

    Args:
        file: File that was passed to `write_share`.
        written: Result of `write_share`.

    Raises:
        gds.StorageError: A write or the sync failed. A failed sync must not be retried: the
            content of the file is unknown from then on.
    """
    for offset, data in written.edges:
        file.write_bytes(data, offset)
    file.sync()


def digest_share(image: ShareImage, buffers: BlockBuffers, context: DigestContext) -> list[str]:
    """Return the digests that `write_share` would return, without writing."""
    digests: list[str] = []
    for index, batch in enumerate(image.plan.batches):
        buffer, memory = buffers.get(index, batch.nbytes)
        _gather(image, batch, memory, on_one_thread=False)
        for _ in _digested(image.plan.share, batch, buffer.memoryview(), context, digests):
            pass
    return digests


def _carry(first: Segment, previous: torch.Tensor, memory: torch.Tensor) -> None:
    """Copy the bytes of an unfinished block from the end of the previous batch."""
    if first.carried:
        memory[first.at - first.carried : first.at] = previous[-first.carried :]


def _gather(image: ShareImage, batch: Batch, memory: torch.Tensor, *, on_one_thread: bool) -> None:
    for segment in batch.segments:
        into = memory[segment.at : segment.at + segment.nbytes]
        first, last = segment.position, segment.position + segment.nbytes
        image.gather(first, last, into, on_one_thread=on_one_thread)


def _digested(
    share: ModelShare,
    batch: Batch,
    view: memoryview,
    context: DigestContext,
    digests: list[str],
) -> Iterator[tuple[int, bytes]]:
    """Append the digest of each piece of a batch; yield its index and the digests of its leaves."""
    for placed in batch.pieces:
        piece = share.pieces[placed.index]
        leaves = leaf_digests(view[placed.at : placed.at + piece.nbytes])
        array = share.entries[piece.entry].digest_array
        digests.append(context.digest_leaves(array, piece.number, leaves))
        yield placed.index, leaves


def _unknown(
    share: ModelShare, batch: Batch, known: KnownLeaves, changing: Container[str] | None
) -> list[PlacedPiece]:
    """Return the pieces of a batch that the file may hold, of which this process does not know."""
    if changing is None or not known.readable:
        return []
    return [
        placed
        for placed in batch.pieces
        if known.of(placed.index) is None
        and share.entries[share.pieces[placed.index].entry].name not in changing
    ]


def _blocks_of(
    share: ModelShare, pieces: Sequence[PlacedPiece], size_bytes: int
) -> list[tuple[int, int, int]]:
    """Return the whole blocks of a file that hold pieces of a batch; see `ReadBack.start`."""
    found: list[tuple[int, int, int]] = []
    for placed in pieces:
        piece = share.pieces[placed.index]
        head = piece.start % ALIGNMENT
        start, stop = piece.start - head, min(-(-piece.stop // ALIGNMENT) * ALIGNMENT, size_bytes)
        first, last = placed.at - head, placed.at - head + stop - start
        if found and found[-1][1] >= first and found[-1][2] + first - found[-1][0] == start:
            found[-1] = found[-1][0], last, found[-1][2]  # it continues the piece before it
        else:
            found.append((first, last, start))
    return found


def _held(
    share: ModelShare, pieces: Sequence[PlacedPiece], read: Sequence[tuple[int, memoryview]]
) -> dict[int, bytes]:
    """Return the digests of the leaves of those pieces that have been read back, by index."""
    found = {}
    for first, data in read:
        for placed in pieces:
            at, nbytes = placed.at - first, share.pieces[placed.index].nbytes
            if at >= 0 and at + nbytes <= data.nbytes:
                found[placed.index] = leaf_digests(data[at : at + nbytes])
    return found


def _changed(piece: SharePiece, leaves: bytes, known: bytes | None) -> list[Range]:
    """Return the ranges of the file in which a piece differs from its known content."""
    if known is None:
        return [(piece.start, piece.stop)]
    return [
        (start, min(start + LEAF_BYTES, piece.stop))
        for at, start in zip(
            range(0, len(leaves), _DIGEST_BYTES),
            range(piece.start, piece.stop, LEAF_BYTES),
            strict=True,
        )
        if leaves[at : at + _DIGEST_BYTES] != known[at : at + _DIGEST_BYTES]
    ]


def _divided(changed: Sequence[Range], segments: Sequence[Segment]) -> Iterator[list[Range]]:
    """Yield, for each segment, the changed ranges that touch what is written of it."""
    index = 0
    for segment in segments:
        start, stop = segment.start - segment.carried, segment.stop
        while index < len(changed) and changed[index][1] <= start:
            index += 1
        last = index
        while last < len(changed) and changed[last][0] < stop:
            last += 1
        yield list(changed[index:last])
