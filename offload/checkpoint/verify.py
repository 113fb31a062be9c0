"""Verification of a checkpoint: every byte of its tensors is compared with its digest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from gds import ALIGNMENT, Backend, Buffer, StorageError
from offload.checkpoint.file_check import PartDirectories
from offload.checkpoint.owner_parts import check_cover, find_owner_part
from offload.checkpoint.reading import are_only_recorded, check_name, check_parts, part_paths
from offload.checkpoint.sealed_slot import SealedRange, SealedSlot
from offload.checkpoint.second_read import checked
from offload.errors import CheckpointError, DamagedError
from offload.format.manifest import Manifest
from offload.format.unreadable import is_of_content


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

    These problems are of two kinds. In the first, the damage is in a directory that only the
    manifest names, and that may belong to the store that this one is a copy of. In the second, only
    the name of the checkpoint's directory is wrong."""

    damaged_parts: tuple[tuple[str, str], ...] = ()
    """Paths of owners' parts that are damaged, each with the problems. These problems are among
    `problems` and `not_marked`: such a part has a mark of its own."""

    whole_parts: tuple[str, ...] = ()
    """Paths of owners' parts that were read, and every byte of which is as it was written."""

    not_seen: tuple[str, ...] = ()
    """Paths at which parts of owners were sealed that are not seen on this node. They were not
    checked: run the same on a node that sees them, or give the directories that they are in."""

    @property
    def ok(self) -> bool:
        """Whether every byte that is seen here is as it was written; see `not_seen`."""
        return not self.problems and not self.unreadable


@dataclass(slots=True)
class Findings:
    """Faults of a checkpoint, collected as they are found."""

    problems: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    not_marked: list[str] = field(default_factory=list)
    in_parts: dict[str, list[str]] = field(default_factory=dict)
    """Problems of each owner's part that has some, damaged or unreadable, by path."""

    def add(
        self, error: CheckpointError | StorageError, *, marks: bool = True, part: str = ""
    ) -> None:
        """Record an error of reading.

        Args:
            error: Error whose message names the place.
            marks: Whether the checkpoint may be marked as damaged because of the error.
            part: Path of the owner's part that the error is about; empty if it is about none.
        """
        is_damage = isinstance(error, CheckpointError) or is_of_content(error)
        (self.problems if is_damage else self.unreadable).append(str(error))
        if is_damage and not marks:
            self.not_marked.append(str(error))
        if part:
            self.in_parts.setdefault(part, []).extend([str(error)] if is_damage else [])


def verify_files(
    backend: Backend,
    path: str,
    manifest: Manifest,
    part_directories: PartDirectories,
    findings: Findings,
    progress: Callable[[int, int], None] | None,
) -> VerifyReport:
    """Check the name and all parts of a checkpoint, and read all tensors; add to what was found."""
    try:
        check_name(path, manifest)
    except CheckpointError as error:
        findings.add(error, marks=False)  # renaming the directory mends this
    # Parts that are known only from the manifest may belong to another copy of the store.
    marks_parts = not are_only_recorded(manifest, part_directories)
    try:
        check_parts(backend, path, manifest, part_directories)
    except (CheckpointError, StorageError) as error:
        findings.add(error, marks=marks_parts)
    found_owners = []
    for reference in manifest.owners:
        try:
            found_owners.append(
                find_owner_part(
                    backend, path, manifest, reference, part_directories, even_quarantined=True
                )
            )
        except (CheckpointError, StorageError) as error:
            findings.add(error, marks=False)  # the part has a mark of its own
    seen = [(owner.path, owner.table) for owner in found_owners if owner.table is not None]
    tables = [table for _, table in seen]
    if tables and len(tables) == len(manifest.owners):
        try:
            check_cover(path, manifest, tables)
        except CheckpointError as error:
            findings.add(error)
    with ExitStack() as opened:
        drives = part_paths(manifest, part_directories, path)
        slot = opened.enter_context(SealedSlot(backend, path, drives, manifest, tables))
        owners = [
            opened.enter_context(SealedSlot(backend, place, (), table)) for place, table in seen
        ]
        checked = _verify_tensors(
            backend, slot, progress, findings, marks_parts=marks_parts, owners=owners
        )
    return VerifyReport(
        tuple(findings.problems),
        checked,
        tuple(findings.unreadable),
        not_marked=tuple(findings.not_marked),
        damaged_parts=tuple(
            (place, "; ".join(texts)) for place, texts in findings.in_parts.items() if texts
        ),
        whole_parts=tuple(place for place, _ in seen if place not in findings.in_parts),
        not_seen=tuple(owner.path for owner in found_owners if owner.table is None),
    )


def _verify_tensors(
    backend: Backend,
    slot: SealedSlot,
    progress: Callable[[int, int], None] | None,
    findings: Findings,
    *,
    marks_parts: bool,
    owners: Sequence[SealedSlot],
) -> int:
    """Read all tensors and record each damaged place.

    A range whose digest is wrong is read a second time before it counts as damaged.
    """
    every = [slot, *owners]
    sizes = [sealed.nbytes for files in every for sealed in files.ranges()]
    total = sum(sizes)
    buffer = backend.allocate(max(sizes, default=0) + ALIGNMENT)
    num_checked = 0
    for files in every:
        for sealed in files.ranges():
            try:
                _verify(files, sealed, buffer.slice(sealed.offset % ALIGNMENT, sealed.nbytes))
            except (StorageError, DamagedError) as error:
                part = "" if files is slot else files.path
                marks = not part and (marks_parts or not sealed.drive)
                findings.add(error, marks=marks, part=part)
            num_checked += sealed.nbytes
            if progress is not None:
                progress(num_checked, total)
        if files is not slot:
            files.close()  # many owners must not exhaust the file descriptors
    return num_checked


def _verify(slot: SealedSlot, sealed: SealedRange, into: Buffer) -> None:
    """Read a range and compare it with its digest."""
    file = slot.file(sealed)
    file.read(into, sealed.offset).result()
    checked(file, sealed, into.memoryview(), slot.context)
