"""Reader of a checkpoint's model into live boxes of any cut, whoever has written the model.

A model that several ranks have written, in one file or in a shard file of each owner, has digests
of their boxes; see `share_reading`. One that a single process has written has digests of blocks of
the whole file. Either way, what holds a wanted element is read as a whole, and compared with its
digest before it reaches a live tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial

import torch

from gds import ALIGNMENT, Backend, File
from offload.checkpoint.file_check import PartDirectories
from offload.checkpoint.recut.layout import out_of_reach
from offload.checkpoint.second_read import reread_and_check
from offload.checkpoint.state_owners import model_of_owners
from offload.device.staging import Traffic
from offload.format.boxes import Box, Cut, hull
from offload.format.digests import MODEL_ARRAY, DigestContext
from offload.format.header import DTYPE_BYTES, TensorEntry
from offload.format.manifest import MODEL_BLOCK_BYTES, Manifest
from offload.format.shares.model_shares import (
    ShareEntry,
    SharePiece,
    TensorBox,
    divide,
    shard_share,
)
from offload.model.live_boxes import LiveBox
from offload.model.model_file import BlockBuffers
from offload.model.share_reading import Placer, ShareReading, StoredShare, require_stored


def read_recut_model(
    backend: Backend,
    path: str,
    manifest: Manifest,
    file: File | None,
    wanted: Sequence[LiveBox],
    traffic: Traffic | None = None,
    parts: PartDirectories = None,
    *,
    partly: bool = False,
) -> int:
    """Read boxes of a checkpoint's model into live tensors; return the number of bytes read.

    Args:
        backend: Storage backend of the checkpoint.
        path: Directory of the checkpoint.
        manifest: Manifest of the checkpoint, as it is on the drive.
        file: The checkpoint's own file with tensors of the model; see `Layout.model_name`. None if
            it is on another host, which takes shard files, and `partly`.
        wanted: Boxes to read. Boxes without elements are ignored.
        traffic: Counter of the bytes that cross to devices; None to count nothing.
        parts: Directories to search for the parts of owners; None for those of the manifest.
        partly: Whether the shard files of owners that are not seen here are left out. The others
            must have every wanted element.

    Raises:
        RanksError: With `partly`, a wanted element is not seen here.
        MismatchError: A wanted box differs from what was written; names it.
        CheckpointError: The part of an owner, which has digests, is missing or damaged.
        DamagedError: The file is damaged. No element has a value from a damaged piece.
        gds.StorageError: The file cannot be read.
    """
    context = DigestContext(manifest.store_id, manifest.generation)
    counter = Traffic() if traffic is None else traffic
    if not manifest.owners and file is not None:
        return _read_blocks(backend, manifest, file, wanted, context, counter)
    owners = model_of_owners(
        backend, path, manifest, parts, sees_first=file is not None, partly=partly
    )
    header = manifest.layout.model_header
    boxes = [[TensorBox(one.name, one.box) for one in owner.model_boxes] for owner in owners]
    if partly:
        _require_reached(path, boxes, [TensorBox(want.name, want.box) for want in wanted])
    shares = None if partly else divide(header, boxes)  # refuses overlaps, and missing elements
    needed = [TensorBox(want.name, want.box) for want in wanted]
    stored = []
    with ExitStack() as opened:
        for number, owner in enumerate(owners):
            own = owner.layout.shard is not None
            share = shard_share(owner.layout) if own or shares is None else shares.share(number)
            digests = {(one.name, one.box): one.digests for one in owner.model_boxes}
            known = [d for entry in share.entries for d in digests.get((entry.name, entry.box), ())]
            if own and owner.path != path and share.pieces_with(needed):
                of_owner = backend.open(f"{owner.path}/{owner.layout.model_name}")
                stored.append(StoredShare(share, opened.enter_context(of_owner), known))
            elif file is not None:
                stored.append(StoredShare(share, file, known))
        reading = ShareReading(stored, wanted)
        size = reading.buffer_bytes
        reading.read(BlockBuffers(backend, size, counter, block_bytes=size), context)
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
    boxes = [[TensorBox(one.name, one.box) for one in owner.model_boxes] for owner in owners]
    _require_reached(path, boxes, wanted)


def _require_reached(
    path: str, boxes: Sequence[Sequence[TensorBox]], wanted: Sequence[TensorBox]
) -> None:
    """Check that the shard files which are seen here have all wanted elements."""
    found: dict[str, list[Box]] = {}
    for one in (box for each in boxes for box in each):
        found.setdefault(one.name, []).append(one.box)
    for want in wanted:
        common = [box.intersection(want.box) for box in found.get(want.name, ())]
        num = sum(box.num_elements for box in common if box is not None)
        if num < want.box.num_elements:
            raise out_of_reach(path, f"{want.name!r} {want.box.notation()}", num, want.box)


def _read_blocks(
    backend: Backend,
    manifest: Manifest,
    file: File,
    wanted: Sequence[LiveBox],
    context: DigestContext,
    traffic: Traffic,
) -> int:
    """Read boxes of a model file that one process has written, block by block."""
    header = manifest.layout.model_header
    by_name: dict[str, list[LiveBox]] = {}
    for want in wanted:
        if want.box.num_elements:
            by_name.setdefault(want.name, []).append(want)
            entry = header.entries.get(want.name)
            require_stored([] if entry is None else [(0, _whole(entry, header.data_start))], want)
    ranges = sorted(
        (header.entries[name].start + low, header.entries[name].start + high)
        for name, wants in by_name.items()
        for low, high in (_bytes_of(header.entries[name], want.box) for want in wants)
    )
    numbers = sorted(
        {n for low, high in ranges for n in range(low // MODEL_BLOCK_BYTES, _ceil(high))}
    )
    entries = sorted((header.entries[n] for n in by_name), key=lambda entry: entry.start)
    memory = backend.allocate(MODEL_BLOCK_BYTES + ALIGNMENT)
    size = ALIGNMENT
    placer = Placer(by_name, BlockBuffers(backend, size, traffic, block_bytes=size))
    data_bytes, done = header.file_bytes - header.data_start, 0
    for number in numbers:
        first = number * MODEL_BLOCK_BYTES
        nbytes = min(MODEL_BLOCK_BYTES, data_bytes - first)
        at = header.data_start + first
        buffer = memory.slice(at % ALIGNMENT, nbytes)
        file.read(buffer, at).result()
        digest = partial(context.digest, MODEL_ARRAY, number)
        found, expected = digest(buffer.memoryview()), manifest.model_digests[number]
        data = buffer.memoryview()
        if found != expected:
            again = reread_and_check(file, at, nbytes, digest, found=found, expected=expected)
            data = again.memoryview()
        done += nbytes
        values = torch.frombuffer(data, dtype=torch.uint8)
        with placer:
            for whole, piece in _pieces(entries, header.data_start, first, first + nbytes):
                start = piece.start - at
                placer.place(whole, piece, values[start : start + piece.nbytes])
    return done


def _pieces(
    entries: Sequence[TensorEntry], data_start: int, first: int, last: int
) -> Iterator[tuple[ShareEntry, SharePiece]]:
    """Yield what a range of bytes of the file's data has of each of some tensors."""
    for entry in entries:
        start, stop = max(first, entry.start), min(last, entry.stop)
        if start < stop:
            piece = SharePiece(0, 0, data_start + start, data_start + stop, 0)
            yield _whole(entry, data_start), piece


def _whole(entry: TensorEntry, data_start: int) -> ShareEntry:
    cut = Cut(entry.shape, Box.whole(entry.shape))
    return ShareEntry(entry.name, entry.dtype, cut, data_start + entry.start)


def _bytes_of(entry: TensorEntry, box: Box) -> tuple[int, int]:
    """Return the bytes of a tensor from the first to the last element of a box."""
    first, last = hull(Box.whole(entry.shape), box)
    return first * DTYPE_BYTES[entry.dtype], last * DTYPE_BYTES[entry.dtype]


def _ceil(stop: int) -> int:
    return -(-stop // MODEL_BLOCK_BYTES)
