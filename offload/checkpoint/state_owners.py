"""Owners of a checkpoint's state, and their boxes, opened for reading by one process.

A checkpoint of one process is the case of one owner with whole parameters. This module does not
import torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from gds import Backend
from offload.checkpoint.file_check import PartDirectories
from offload.checkpoint.owner_parts import OwnerPart, find_owner_parts, lock_owner_parts
from offload.checkpoint.reading import part_paths
from offload.checkpoint.sealed_slot import SealedSlot
from offload.errors import CheckpointError
from offload.format._manifest_fields import ScalarValue
from offload.format.boxes import Box
from offload.format.layout import Layout, ParameterSpec
from offload.format.manifest import Manifest
from offload.format.shares.part_table import OwnerTable


@dataclass(frozen=True, slots=True, eq=False)
class StateOwner:
    """One owner of a checkpoint's state, which stores its boxes like a checkpoint of its own."""

    number: int
    """Number of the owner; 0 for the checkpoint's own directory."""

    sealed: Manifest | OwnerTable
    """Manifest of the checkpoint for owner 0, and otherwise the table of the part."""

    files: SealedSlot
    """Files of the owner's part, each opened when it is needed, also after `SealedSlot.close`."""

    @property
    def layout(self) -> Layout:
        """Layout of the owner's boxes. Its `Layout.model` is the whole model."""
        return self.sealed.layout

    @property
    def scalars(self) -> Sequence[tuple[ScalarValue, ...] | None]:
        """For each parameter of the layout, its scalar state; None if it has no state yet."""
        return self.sealed.scalars

    @classmethod
    def of_part(cls, backend: Backend, part: OwnerPart, table: OwnerTable) -> StateOwner:
        """Return the owner of a part."""
        return cls(part.reference.owner, table, SealedSlot(backend, part.path, (), table))


@dataclass(frozen=True, slots=True, eq=False)
class StoredBox:
    """A box of a parameter that an owner has stored."""

    owner: StateOwner

    index: int
    """Index of the box among the parameters of the owner's layout."""

    @property
    def spec(self) -> ParameterSpec:
        """Description of the box in its owner's layout."""
        return self.owner.layout.parameters[self.index]

    @property
    def box(self) -> Box:
        """Elements of the whole parameter that the box has."""
        return self.spec.box


def stored_boxes(owners: Iterable[StateOwner]) -> dict[str, list[StoredBox]]:
    """Return all boxes that owners have stored of each parameter, by the parameter's name."""
    found: dict[str, list[StoredBox]] = {}
    for owner in owners:
        for index, spec in enumerate(owner.layout.parameters):
            found.setdefault(spec.name, []).append(StoredBox(owner, index))
    return found


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
) -> list[StateOwner]:
    """Open the state of all owners of a checkpoint, and lock their parts against rewriting.

    The caller keeps the checkpoint itself from being recycled.
    """
    found = find_owner_parts(backend, path, manifest, parts)
    for lock in lock_owner_parts(backend, found):
        resources.callback(lock.release)
    is_here = reach is None or reach.sees_first
    owners = _owners(
        backend, path, manifest, parts, found, sees_first=is_here, partly=reach is not None
    )
    for owner in owners:
        resources.callback(owner.files.close)
    return owners


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
) -> list[StateOwner]:
    """Return the owners of a checkpoint without locks, to read the model; owner 0 first.

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
    found = find_owner_parts(backend, path, manifest, parts)
    return _owners(backend, path, manifest, parts, found, sees_first=sees_first, partly=partly)


def _owners(
    backend: Backend,
    path: str,
    manifest: Manifest,
    parts: PartDirectories,
    found: Iterable[OwnerPart],
    *,
    sees_first: bool,
    partly: bool,
) -> list[StateOwner]:
    """Return owner 0, if it is seen here, and the owners of the parts that were found."""
    owners = []
    if sees_first:
        files = SealedSlot(backend, path, part_paths(manifest, parts, path), manifest)
        owners.append(StateOwner(0, manifest, files))
    for part in found:
        if part.table is not None:
            owners.append(StateOwner.of_part(backend, part, part.table))
        elif not partly:
            raise CheckpointError(
                f"{path}: the part of owner {part.reference.owner} of its state is not seen here "
                f"(it was sealed at {part.path}): resume on a host that sees the parts of all "
                "owners"
            )
    return owners
