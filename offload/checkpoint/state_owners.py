"""Owners of a checkpoint's state, opened for reading by one process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from gds import Backend
from offload.checkpoint.file_check import PartDirectories
from offload.checkpoint.owner_parts import OwnerPart, find_owner_parts, lock_owner_parts
from offload.checkpoint.reading import part_paths
from offload.checkpoint.sealed_slot import SealedOwner, SealedSlot
from offload.errors import CheckpointError
from offload.format._manifest_fields import ScalarValue
from offload.format.layout import Layout
from offload.format.manifest import Manifest
from offload.format.shares.owners import ModelBox


@dataclass(frozen=True, slots=True, eq=False)
class SourceOwner:
    """One owner of a checkpoint's state."""

    number: int
    """Number of the owner; 0 for the first directory."""

    layout: Layout
    """Layout of the owner's boxes. Its `Layout.model` is the whole model."""

    scalars: Sequence[tuple[ScalarValue, ...] | None]
    """For each parameter of the layout, its scalar state; None if it has no state yet."""

    files: SealedSlot | SealedOwner
    """Files of the owner's state, each opened when it is first needed."""


@dataclass(frozen=True, slots=True)
class Reach:
    """What one of several hosts sees of a checkpoint."""

    sees_first: bool
    """Whether the checkpoint itself, which has the files of owner 0, is seen here."""

    with_state: frozenset[str]
    """Names of all parameters of which any owner has state, on whatever host it is."""


def open_owners(
    backend: Backend,
    path: str,
    manifest: Manifest,
    parts: PartDirectories = None,
    *,
    resources: ExitStack,
    reach: Reach | None = None,
) -> list[SourceOwner]:
    """Open the state of all owners of a checkpoint, and lock their parts against rewriting.

    The caller keeps the checkpoint itself from being recycled.
    """
    owners: list[SourceOwner] = []
    if reach is None or reach.sees_first:
        slot = SealedSlot(backend, path, part_paths(manifest, parts, path), manifest)
        resources.callback(slot.close)
        owners.append(SourceOwner(0, manifest.layout, manifest.scalars, slot))
    found = find_owner_parts(backend, path, manifest, parts)
    for lock in lock_owner_parts(backend, found):
        resources.callback(lock.release)
    for part in found:
        if part.table is None:
            if reach is None:
                raise _missing(path, part)
            continue
        files = SealedOwner(backend, part.path, part.table)
        resources.callback(files.close)
        owner = SourceOwner(part.reference.owner, part.table.layout, part.table.scalars, files)
        owners.append(owner)
    return owners


@dataclass(frozen=True, slots=True, eq=False)
class ModelOwner:
    """What one owner of a checkpoint has written of the model."""

    layout: Layout
    """Layout of the owner's state, with its shard file if it has one."""

    boxes: tuple[ModelBox, ...]
    """Boxes of the model that the owner has written, with their digests."""

    path: str
    """Directory of the owner's part, or of the checkpoint for owner 0."""


def names_with_state(
    backend: Backend,
    path: str,
    manifest: Manifest,
    parts: PartDirectories,
    *,
    sees_first: bool,
) -> set[str]:
    """Return the names of the parameters of which an owner that is seen here has state.

    Args:
        backend: Backend of the parts.
        path: Directory of the checkpoint.
        manifest: Manifest of the checkpoint.
        parts: Directories of the store on this host.
        sees_first: Whether the checkpoint itself is seen here.

    Raises:
        CheckpointError: A part is damaged, or is not that of the checkpoint.
        UnreadableError: A part could not be read.
    """
    found = find_owner_parts(backend, path, manifest, parts)
    layouts = [part.table.layout for part in found if part.table is not None]
    if sees_first:
        layouts.append(manifest.layout)
    return {spec.name for layout in layouts for spec in layout.parameters}


def model_of_owners(
    backend: Backend,
    path: str,
    manifest: Manifest,
    parts: PartDirectories = None,
    *,
    sees_first: bool = True,
    partly: bool = False,
) -> list[ModelOwner]:
    """Return what each owner of a checkpoint has written of the model, owner 0 first.

    Args:
        backend: Storage backend of the checkpoint.
        path: Directory of the checkpoint.
        manifest: Manifest of the checkpoint.
        parts: Directories to search for the parts of owners; None for those of the manifest.
        sees_first: Whether the checkpoint itself, which has the files of owner 0, is seen here.
        partly: Whether owners that are not seen here are left out.

    Raises:
        CheckpointError: A part is not seen here, is damaged, or is not that of the checkpoint.
        UnreadableError: A part could not be read.
    """
    found: list[ModelOwner] = []
    if sees_first:
        found.append(ModelOwner(manifest.layout, manifest.model_boxes, path))
    for part in find_owner_parts(backend, path, manifest, parts):
        if part.table is None:
            if not partly:
                raise _missing(path, part)
            continue
        found.append(ModelOwner(part.table.layout, part.table.model_boxes, part.path))
    return found


def _missing(path: str, part: OwnerPart) -> CheckpointError:
    return CheckpointError(
        f"{path}: the part of owner {part.reference.owner} of its state is not seen here (it was "
        f"sealed at {part.path}): resume on a host that sees the parts of all owners"
    )
