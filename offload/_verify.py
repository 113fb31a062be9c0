"""Reading every byte of a checkpoint's tensors, and comparing it with its digests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gds import ALIGNMENT, Backend, StorageError
from offload.digests import DigestContext
from offload.layout import array_file_name
from offload.manifest import MODEL_BLOCK_BYTES, Manifest
from offload.slot import MODEL_NAME
from offload.unreadable import is_of_content, unreadable

_Range = tuple[str, str, int, int, int, str]
"""File, name that the digest has, its index, offset, length, digest."""


def verify_tensors(
    backend: Backend,
    path: str,
    parts: Sequence[str],
    manifest: Manifest,
    progress: Callable[[int, int], None] | None,
) -> tuple[list[str], int]:
    """Return a sentence for each damaged place, and the bytes that were read.

    Args:
        backend: Where the checkpoint is.
        path: Of it.
        parts: Paths of its parts on other drives.
        manifest: Of it.
        progress: Called with the bytes checked so far and the bytes in all.

    Raises:
        UnreadableError: Something could not be read, which says nothing about what it holds.
    """
    problems: list[str] = []
    context = DigestContext(manifest.store_id, manifest.generation)
    ranges = _ranges([path, *parts], manifest)
    total = sum(nbytes for *_, nbytes, _ in ranges)
    buffer = backend.allocate(max((r[4] for r in ranges), default=0) + ALIGNMENT)
    checked = 0
    for file_path, array, index, offset, nbytes, expected in ranges:
        target = buffer.slice(offset % ALIGNMENT, nbytes)
        try:
            file = backend.open(file_path)
            try:
                file.read(target, offset).result()
            finally:
                file.close()
        except StorageError as error:
            if not is_of_content(error):
                raise unreadable(error, checkpoint=path) from error
            problems.append(str(error))
        else:
            found = context.digest(array, index, target.memoryview())
            if found != expected:
                problems.append(
                    f"{file_path}: bytes {offset} to {offset + nbytes} are damaged: digest "
                    f"{found}, expected {expected}"
                )
        checked += nbytes
        if progress is not None:
            progress(checked, total)
    return problems, checked


def _ranges(places: Sequence[str], manifest: Manifest) -> list[_Range]:
    layout = manifest.layout
    ranges: list[_Range] = []
    data_start = layout.model_header.data_start
    data_bytes = layout.model_header.file_bytes - data_start
    for block, expected in enumerate(manifest.model_digests):
        start = block * MODEL_BLOCK_BYTES
        nbytes = min(MODEL_BLOCK_BYTES, data_bytes - start)
        path = f"{places[0]}/{MODEL_NAME}"
        ranges.append((path, "model", block, data_start + start, nbytes, expected))
    for name, digests in manifest.digests.items():
        for chunk, digest in enumerate(digests):
            offset, nbytes = layout.byte_range(name, chunk)
            if digest is not None and nbytes:
                path = f"{places[layout.drives[chunk]]}/{array_file_name(name)}"
                ranges.append((path, name, chunk, offset, nbytes, digest))
    return ranges
