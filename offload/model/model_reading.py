"""Reader of a checkpoint's model into live boxes of any cut, whoever has written the model.

A file that one process has written has digests of its blocks, whatever tensors lie in them. A file
that several ranks have written, and the shard files of owners, have digests of pieces of boxes.
Either way, each range that holds a wanted element is read as a whole, once. It is compared with its
digest before any of it reaches a live tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

import torch

from gds import ALIGNMENT, Backend, File, IOFuture
from offload.checkpoint.file_check import PartDirectories
from offload.checkpoint.recut.layout import out_of_reach
from offload.checkpoint.sealed_slot import ModelFile, SealedSlot, model_file
from offload.checkpoint.second_read import checked
from offload.checkpoint.state_owners import StateOwner, model_of_owners
from offload.device.boundary import Event, boundary_of, is_on_device, marks_of
from offload.device.staging import Traffic
from offload.errors import CheckpointError, MismatchError
from offload.format.boxes import Box, cut_range, hull, uncovered
from offload.format.digests import MODEL_BLOCK_BYTES, DigestContext, KnownLeaves
from offload.format.header import DTYPE_BYTES
from offload.format.manifest import Manifest
from offload.format.shares.model_blocks import Batch, cut_batches
from offload.format.shares.model_shares import ShareEntry, SharePiece, TensorBox, divide
from offload.format.shares.part_table import OwnerTable
from offload.model.model_file import BlockBuffers, has_failed
from offload.model.tensor_image import bytes_of, copy_on_one_thread
from offload.update.dtypes import DTYPE_CODES, DTYPES


@dataclass(frozen=True, slots=True, eq=False)
class LiveBox:
    """A box of a tensor of the model, with its live memory on this rank.

    The memory of a shard may be replaced, for example by a lazy initialisation. So live boxes are
    made anew for each use.
    """

    name: str
    """Name of the tensor in the model file."""

    box: Box

    tensor: torch.Tensor
    """Live memory of the box; its shape is that of the box."""

    @classmethod
    def whole(cls, name: str, tensor: torch.Tensor) -> LiveBox:
        """Return the box of a tensor that is whole on this rank."""
        return cls(name, Box.whole(tensor.shape), tensor)


@dataclass(frozen=True, slots=True, eq=False)
class StoredModel:
    """An open file with tensors of a model."""

    file: File

    content: ModelFile
    """What is in the file."""

    known: KnownLeaves | None = None
    """Record to which correctly read ranges are added, by their position; None for no record."""


class _Work(NamedTuple):
    """Ranges of one file that are in memory at the same time."""

    stored: StoredModel

    numbers: Sequence[int]
    """Positions, among the ranges of the file, of those that the batch was cut from."""

    batch: Batch


class ModelReading:
    """Boxes to read, with the ranges of files that hold them.

    Args:
        stored: Files that have the boxes; together they have each element once.
        wanted: Boxes that this rank needs. Boxes without elements are ignored.
        batch_bytes: Size of the memory of a batch, in bytes; at least that of the largest range.

    Raises:
        MismatchError: A wanted box differs from what was written in name, dtype or shape, or has
            elements that nobody wrote; names it.
        CheckpointError: A wanted element has no digest.
    """

    def __init__(
        self,
        stored: Sequence[StoredModel],
        wanted: Sequence[LiveBox],
        *,
        batch_bytes: int = MODEL_BLOCK_BYTES,
    ) -> None:
        self._wanted: dict[str, list[LiveBox]] = {}
        for want in wanted:
            if want.box.num_elements:
                self._wanted.setdefault(want.name, []).append(want)
        for name, wants in self._wanted.items():
            written = [
                (number, entry)
                for number, source in enumerate(stored)
                for entry in source.content.by_name.get(name, ())
            ]
            for want in wants:
                _require_stored(written, want)
        self._work = [work for one in stored for work in self._batches(one, batch_bytes)]

    def _batches(self, stored: StoredModel, batch_bytes: int) -> Iterator[_Work]:
        ranges = stored.content.ranges
        needed: set[int] = set()
        for name, wants in self._wanted.items():
            for entry in stored.content.by_name.get(name, ()):
                for want in wants:
                    common = entry.box.intersection(want.box)
                    if common is not None:
                        first, last = (
                            entry.start + at * DTYPE_BYTES[entry.dtype]
                            for at in hull(entry.box, common)
                        )
                        try:
                            needed.update(stored.content.ranges_with(first, last))
                        except LookupError as error:
                            raise CheckpointError(f"{stored.file.path}: {error}") from error
        numbers = sorted(needed)
        pieces = [SharePiece(0, 0, ranges[n].offset, ranges[n].stop, 0) for n in numbers]
        most = max((piece.start % ALIGNMENT + piece.nbytes for piece in pieces), default=0)
        for batch in cut_batches(pieces, max(batch_bytes, -(-most // ALIGNMENT) * ALIGNMENT)):
            yield _Work(stored, numbers, batch)

    @property
    def buffer_bytes(self) -> int:
        """Size of the memory that a batch needs, in bytes."""
        return max((work.batch.nbytes for work in self._work), default=ALIGNMENT)

    @property
    def num_bytes(self) -> int:
        """Number of bytes that are read."""
        return sum(segment.nbytes for work in self._work for segment in work.batch.segments)

    def read(self, buffers: BlockBuffers, context: DigestContext) -> None:
        """Read the boxes into their live tensors, and check every range that holds some of them.

        While a batch is checked and copied, the reads of the next three are in flight. A range that
        is wrong is read a second time before an error is raised: see `second_read`.

        Args:
            buffers: Blocks of memory of at least `buffer_bytes` each.
            context: Store and generation of the digests.

        Raises:
            DamagedError: Both reads of a range are wrong. Other live tensors may have been
                overwritten, but no element has a value from a damaged range.
            gds.StorageError: A file cannot be read.
        """
        memory = buffers.for_reading(len(self._work))
        reads: dict[int, list[IOFuture]] = {}
        placer = _Placer(self._wanted, buffers.traffic)

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
                arrived = [read for each in reads.values() for read in each]
                has_caught_up = bool(arrived) and all(read.done() for read in arrived)
                buffer = memory[index % len(memory)].buffer
                with placer:
                    for placed in work.batch.pieces:
                        number = work.numbers[placed.index]
                        one = work.stored.content.ranges[number]
                        data = buffer.slice(placed.at, one.nbytes).memoryview()
                        data, leaves = checked(work.stored.file, one, data, context)
                        if work.stored.known is not None:
                            work.stored.known.note(number, leaves)
                        placer.place(
                            work.stored.content, one.offset, data, on_one_thread=not has_caught_up
                        )
        finally:
            for each in reads.values():
                for read in each:
                    has_failed(read)  # another error is being raised, or it was not needed


class _Placer:
    """Copies ranges into live tensors. Copies to devices are complete when its block ends."""

    def __init__(self, wanted: dict[str, list[LiveBox]], traffic: Traffic) -> None:
        tensors = [want.tensor for wants in wanted.values() for want in wants]
        self._wanted = wanted
        self._traffic = traffic
        self._marks = marks_of(tensors)
        self._flattened: dict[torch.device, Event] = {}
        # A tensor that was made in inference mode can be written in that mode only. A model that is
        # not trained may have such tensors.
        self._in_inference = any(tensor.is_inference() for tensor in tensors)
        self._sent: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def __enter__(self) -> None:
        self._sent = {}

    def __exit__(self, *_: object) -> None:
        sent, self._sent = self._sent, {}
        with torch.inference_mode(self._in_inference), torch.no_grad():
            events = [
                (device, boundary_of(device).send(pairs, self._after(device)))
                for device, pairs in sent.items()
            ]
            for device, event in events:
                boundary_of(device).wait(event)
                self._traffic.sent(sum(s.nbytes for s, _ in sent[device] if not is_on_device(s)))

    def _after(self, device: torch.device) -> list[Event]:
        """Return the points that copies to a device wait for."""
        return [marks[device] for marks in (self._marks, self._flattened) if device in marks]

    def place(
        self, content: ModelFile, start: int, data: memoryview, *, on_one_thread: bool
    ) -> None:
        """Copy the elements of a range that are wanted.

        Args:
            content: What is in the file.
            start: First byte of the range in the file.
            data: Bytes of the range in host memory, which must not change before the block ends.
            on_one_thread: Whether host memory is copied on the calling thread alone.
        """
        values = torch.frombuffer(data, dtype=torch.uint8)
        with torch.inference_mode(self._in_inference), torch.no_grad():
            for entry in content.entries_in(start, start + len(data)):
                if entry.name in self._wanted:
                    first = max(start, entry.start)
                    last = min(start + len(data), entry.start + entry.nbytes)
                    self._place(entry, first, values[first - start : last - start], on_one_thread)

    def _place(
        self, entry: ShareEntry, start: int, data: torch.Tensor, on_one_thread: bool
    ) -> None:
        dtype = DTYPES[entry.dtype]
        first = (start - entry.start) // dtype.itemsize
        if data.storage_offset() % dtype.itemsize:
            data = data.clone()  # a file's tensors need not be aligned to their elements
        values = data.view(dtype)
        at = 0
        for part in cut_range(entry.box.sizes, first, first + len(values)):
            flat, held = values[at : at + part.num_elements], part.shifted(entry.box.offsets)
            at += part.num_elements
            for want in self._wanted[entry.name]:
                common = held.intersection(want.box)
                if common is not None:
                    source = flat.view(part.sizes)[common.within(held).slices]
                    into = want.tensor.detach()[common.within(want.box).slices]
                    self._copy(source, into, on_one_thread)

    def _copy(self, source: torch.Tensor, into: torch.Tensor, on_one_thread: bool) -> None:
        is_plain = into.is_contiguous() and not (into.is_conj() or into.is_neg())
        if is_on_device(into):
            device, source = into.device, source.contiguous()
            pairs = self._sent.setdefault(device, [])
            if not is_plain:  # only plain memory crosses to a device
                boundary = boundary_of(device)
                after = [self._marks[device]] if device in self._marks else []
                flat = boundary.flatten(into, after).view(into.shape)
                # New values that are sent before the old ones are in the copy would be lost.
                self._flattened[device] = boundary.fetch([], [])
                pairs.append((source, flat))
                source = flat
            pairs.append((source, into))
        elif on_one_thread and source.is_contiguous() and is_plain:
            copy_on_one_thread(bytes_of(source), bytes_of(into))
        else:
            into.copy_(source)


def _require_stored(written: Sequence[tuple[int, ShareEntry]], want: LiveBox) -> None:
    """Check that every element of a wanted box was written, with the dtype of its live tensor."""
    what = f"{want.box.notation()} of {want.name!r}"
    dtype, sizes = DTYPE_CODES.get(want.tensor.dtype), tuple(want.tensor.shape)
    if sizes != want.box.sizes:
        raise MismatchError(f"{what}: the live tensor's shape is {list(sizes)}")
    parts = []
    for number, entry in written:
        if entry.dtype != dtype or not want.box.fits(entry.cut.shape):
            raise MismatchError(
                f"{what} is {want.tensor.dtype} in the model, but the checkpoint's tensor is "
                f"{entry.dtype} with shape {list(entry.cut.shape)}: build the model as it was "
                "when the checkpoint was made"
            )
        common = entry.box.intersection(want.box)
        if common is not None:
            parts.append((number, common.within(want.box)))
    for box, ranks in uncovered(sizes, parts):
        raise MismatchError(
            f"{box.shifted(want.box.offsets).notation()} of {want.name!r} was written {len(ranks)} "
            "times by the ranks of the checkpoint, expected once: pass what all ranks have written"
        )


def read_model(
    backend: Backend,
    path: str,
    manifest: Manifest,
    wanted: Sequence[LiveBox],
    traffic: Traffic | None = None,
    parts: PartDirectories = None,
    *,
    sees_first: bool = True,
    partly: bool = False,
) -> int:
    """Read boxes of a checkpoint's model into live tensors; return the number of bytes read.

    Args:
        backend: Storage backend of the checkpoint.
        path: Directory of the checkpoint.
        manifest: Manifest of the checkpoint, as it is on the drive.
        wanted: Boxes to read. Boxes without elements are ignored.
        traffic: Counter of the bytes that cross to devices; None to count nothing.
        parts: Directories to search for the parts of owners; None for those of the manifest.
        sees_first: Whether the checkpoint's own directory is seen here. If it is not, this takes
            shard files, and `partly`.
        partly: Whether the shard files of owners that are not seen here are left out. The others
            must have every wanted element.

    Raises:
        RanksError: With `partly`, a wanted element is not seen here.
        MismatchError: A wanted box differs from what was written; names it.
        CheckpointError: The part of an owner, which has digests, is missing or damaged.
        DamagedError: The file is damaged. No element has a value from a damaged range.
        gds.StorageError: The file cannot be read.
    """
    if manifest.owners:
        owners = model_of_owners(
            backend, path, manifest, parts, sees_first=sees_first, partly=partly
        )
    else:
        owners = [StateOwner(0, manifest, SealedSlot(backend, path, (), manifest))]
    if partly:
        _require_reached(path, owners, [TensorBox(want.name, want.box) for want in wanted])
    elif manifest.owners:  # refuses overlaps, and missing elements
        divide(manifest.layout.model_header, [_boxes_of(owner) for owner in owners])
    if manifest.layout.shard is None:
        tables = [one.sealed for one in owners if isinstance(one.sealed, OwnerTable)]
        found = [(owners[0], model_file(manifest, tables))]
    else:
        found = [(owner, model_file(owner.sealed)) for owner in owners]
    with ExitStack() as opened:
        stored = []
        for owner, content in found:
            if any(
                not want.box.fits(entry.cut.shape) or entry.box.intersection(want.box)
                for want in wanted
                for entry in content.by_name.get(want.name, ())
            ):
                opened.callback(owner.files.close)
                stored.append(StoredModel(owner.files.model, content))
        reading = ModelReading(stored, wanted)
        size = reading.buffer_bytes
        context = DigestContext(manifest.store_id, manifest.generation)
        reading.read(BlockBuffers(backend, size, traffic, block_bytes=size), context)
    return reading.num_bytes


def require_seen_model(
    backend: Backend,
    path: str,
    manifest: Manifest,
    wanted: Sequence[TensorBox],
    parts: PartDirectories,
    *,
    sees_first: bool,
) -> None:
    """Check that the shard files which are seen on this host have all wanted elements.

    Args:
        backend: Storage backend of the parts.
        path: Directory of the checkpoint.
        manifest: Manifest of the checkpoint, as it is on the drive.
        wanted: Boxes of the model.
        parts: Directories of the store on this host.
        sees_first: Whether the checkpoint itself is seen here.

    Raises:
        RanksError: They do not; names the tensor.
        CheckpointError: A part is damaged, or is not that of the checkpoint.
    """
    owners = model_of_owners(backend, path, manifest, parts, sees_first=sees_first, partly=True)
    _require_reached(path, owners, wanted)


def _require_reached(path: str, owners: Sequence[StateOwner], wanted: Sequence[TensorBox]) -> None:
    found: dict[str, list[Box]] = {}
    for one in (box for owner in owners for box in _boxes_of(owner)):
        found.setdefault(one.name, []).append(one.box)
    for want in wanted:
        common = [box.intersection(want.box) for box in found.get(want.name, ())]
        num = sum(box.num_elements for box in common if box is not None)
        if num < want.box.num_elements:
            raise out_of_reach(path, f"{want.name!r} {want.box.notation()}", num, want.box)


def _boxes_of(owner: StateOwner) -> list[TensorBox]:
    return [TensorBox(one.name, one.box) for one in owner.sealed.model_boxes]
