"""Verification of a checkpoint: every byte of its tensors is compared with its digest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from gds import ALIGNMENT, Backend, StorageError
from offload.checkpoint.second_look import look_again
from offload.errors import CheckpointError, DamagedError
from offload.format.digests import DigestContext
from offload.format.layout import array_file_name
from offload.format.manifest import MODEL_BLOCK_BYTES, Manifest
from offload.format.names import MODEL_NAME
from offload.format.unreadable import is_of_content

_Range = tuple[int, str, str, int, int, int, str]
"""Drive, path of the file, array in the digest, index in the digest, offset and length in bytes,
and expected digest."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Result of a complete read of a checkpoint."""

    problems: tuple[str, ...]
    """One sentence for each damaged place; each names file and byte range."""

    bytes_checked: int
    """Size in bytes of the tensor data that was checked, including unreadable places."""

    unreadable: tuple[str, ...] = ()
    """One sentence for each place that could not be read. Nothing is known about its content."""

    quarantined: str = ""
    """Reason why the checkpoint is marked as damaged after verification; empty if unmarked."""

    not_marked: tuple[str, ...] = ()
    """Problems for which `offload.verify_and_mark` does not mark the checkpoint.

    There are two kinds. The damage may be in a directory that is known only from the manifest, and
    so may belong to the store that this one is a copy of. Or nothing is wrong but the name of the
    checkpoint."""

    @property
    def ok(self) -> bool:
        """Whether every byte is as it was written."""
        return not self.problems and not self.unreadable


@dataclass(slots=True)
class Findings:
    """Faults of a checkpoint, collected as they are found."""

    problems: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    not_marked: list[str] = field(default_factory=list)

    def add(self, error: CheckpointError | StorageError, *, marks: bool = True) -> None:
        """Record an error of reading.

        Args:
            error: Error whose message names the place.
            marks: Whether the checkpoint may be marked as damaged because of the error.
        """
        speaks = isinstance(error, CheckpointError) or is_of_content(error)
        (self.problems if speaks else self.unreadable).append(str(error))
        if speaks and not marks:
            self.not_marked.append(str(error))


def verify_tensors(
    backend: Backend,
    path: str,
    parts: Sequence[str],
    manifest: Manifest,
    progress: Callable[[int, int], None] | None,
    findings: Findings,
    *,
    marks_parts: bool,
) -> int:
    """Read all tensors and record each damaged place.

    A range whose digest is wrong is read a second time before it counts as damaged.

    Args:
        backend: Storage backend of the checkpoint.
        path: Directory of the checkpoint.
        parts: Paths of the checkpoint's parts on other drives.
        manifest: Manifest of the checkpoint.
        progress: Function that is called with the bytes checked so far and the total; None if
            progress is not reported.
        findings: Object to which faults are added.
        marks_parts: Whether the checkpoint may be marked because of damage in its parts.

    Returns:
        Size in bytes of the ranges that were checked, including those that could not be read.
    """
    context = DigestContext(manifest.store_id, manifest.generation)
    ranges = _ranges([path, *parts], manifest)
    total = sum(nbytes for *_, nbytes, _ in ranges)
    buffer = backend.allocate(max((nbytes for *_, nbytes, _ in ranges), default=0) + ALIGNMENT)
    checked = 0
    for drive, file_path, array, index, offset, nbytes, expected in ranges:
        target = buffer.slice(offset % ALIGNMENT, nbytes)
        try:
            file = backend.open(file_path)
            try:
                file.read(target, offset).result()
                digest = partial(context.digest, array, index)
                found = digest(target.memoryview())
                if found != expected:
                    look_again(file, offset, nbytes, digest, found=found, expected=expected)
            finally:
                file.close()
        except (StorageError, DamagedError) as error:
            findings.add(error, marks=marks_parts or not drive)
        checked += nbytes
        if progress is not None:
            progress(checked, total)
    return checked


def _ranges(places: Sequence[str], manifest: Manifest) -> list[_Range]:
    layout = manifest.layout
    ranges: list[_Range] = []
    data_start = layout.model_header.data_start
    data_bytes = layout.model_header.file_bytes - data_start
    for block, expected in enumerate(manifest.model_digests):
        start = block * MODEL_BLOCK_BYTES
        nbytes = min(MODEL_BLOCK_BYTES, data_bytes - start)
        path = f"{places[0]}/{MODEL_NAME}"
        ranges.append((0, path, "model", block, data_start + start, nbytes, expected))
    for name, digests in manifest.digests.items():
        for chunk, digest in enumerate(digests):
            offset, nbytes = layout.byte_range(name, chunk)
            if digest is not None and nbytes:
                drive = layout.drives[chunk]
                path = f"{places[drive]}/{array_file_name(name)}"
                ranges.append((drive, path, name, chunk, offset, nbytes, digest))
    return ranges
