"""Owners of a checkpoint's state, and their boxes, opened for reading by one process.

A checkpoint of one process is the case of one owner with whole parameters. This module does not
import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass

from gds import Backend
from offload.checkpoint.file_check import PartDirectories
from offload.checkpoint.owner_parts import OwnerPart, find_owner_parts, lock_owner_parts
from offload.checkpoint.reading import part_paths
from offload.checkpoint.sealed_slot import SealedOwner, SealedSlot
from offload.errors import CheckpointError
from offload.format.boxes import Box
from offload.format.layout import ParameterSpec
from offload.format.manifest import Manifest
from offload.format.shares.part_table import OwnerTable


class StateOwner:
    """One owner of a checkpoint's state, which stores its boxes like a checkpoint of its own.

    Args:
        number: Number of the owner; 0 for the checkpoint's own directory.
        sealed: Manifest of the checkpoint for owner 0, and otherwise the table of the part.
        path: Directory of the owner's part, or of the checkpoint for owner 0.
        open_files: Function that returns the files of the state, each opened when it is needed.
    """

    def __init__(
        self,
        number: int,
        sealed: Manifest | OwnerTable,
        path: str,
        open_files: Callable[[], SealedSlot | SealedOwner],
    ) -> None:
        self.number = number
        self.layout = sealed.layout
        """Layout of the owner's boxes. Its `Layout.model` is the whole model."""
        self.scalars = sealed.scalars
        """For each parameter of the layout, its scalar state; None if it has no state yet."""
        self.model_boxes = sealed.model_boxes
        """Boxes of the model that the owner has written, with their digests."""
        self.path = path
        self._open_files = open_files
        self._files: SealedSlot | SealedOwner | None = None

    @property
    def files(self) -> SealedSlot | SealedOwner:
        """Files of the owner's state. After `close` they are opened again if they are needed."""
        if self._files is None:
            self._files = self._open_files()
        return self._files

    def close(self) -> None:
        """Close all files. Idempotent."""
        files, self._files = self._files, None
        if files is not None:
            files.close()


def owner_of_part(backend: Backend, part: OwnerPart, table: OwnerTable) -> StateOwner:
    """Return the owner of a part."""
    number, path = part.reference.owner, part.path
    return StateOwner(number, table, path, lambda: SealedOwner(backend, path, table))


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
    owners = _owners(backend, path, manifest, parts, sees_first=reach is None or reach.sees_first)
    found = find_owner_parts(backend, path, manifest, parts)
    for lock in lock_owner_parts(backend, found):
        resources.callback(lock.release)
    owners += _further(backend, path, found, partly=reach is not None)
    for owner in owners:
        resources.callback(owner.close)
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
    first = _owners(backend, path, manifest, parts, sees_first=sees_first)
    return first + _further(backend, path, found, partly=partly)


def _owners(
    backend: Backend,
    path: str,
    manifest: Manifest,
    parts: PartDirectories,
    *,
    sees_first: bool,
) -> list[StateOwner]:
    """Return owner 0 if it is seen here."""

    def open_files() -> SealedSlot:
        """Return the files of the checkpoint's own directory, and of its parts on other drives."""
        return SealedSlot(backend, path, part_paths(manifest, parts, path), manifest)

    return [StateOwner(0, manifest, path, open_files)] if sees_first else []


def _further(
    backend: Backend, path: str, found: Iterable[OwnerPart], *, partly: bool
) -> list[StateOwner]:
    """Return the owners of parts; those that are not seen here may be left out."""
    owners = []
    for part in found:
        if part.table is not None:
            owners.append(owner_of_part(backend, part, part.table))
        elif not partly:
            raise _missing(path, part)
    return owners


def _missing(path: str, part: OwnerPart) -> CheckpointError:
    return CheckpointError(
        f"{path}: the part of owner {part.reference.owner} of its state is not seen here (it was "
        f"sealed at {part.path}): resume on a host that sees the parts of all owners"
    )
