"""List of a store's checkpoints, one line for each. Writes nothing, and does not import torch."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from gds import Backend
from gds.opening import given_or_local
from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.file_check import PartDirectories, kind_of
from offload.checkpoint.opening import owners_here, stores_below
from offload.checkpoint.owner_parts import owner_directories, parts_of_owner
from offload.checkpoint.reading import (
    checkpoint_paths,
    decode_manifest,
    read_in_store,
    stat_given_path,
)
from offload.errors import CheckpointError, CheckpointNotFoundError, UnreadableError
from offload.format.manifest import Manifest
from offload.format.names import LOCK_NAME, MANIFEST_NAME, is_slot_name
from offload.format.unreadable import reading, unreadable
from offload.retention.pins import FoundPins, read_pins

_NO_STORE = (
    "there is no store here; give the directory= that the training was given, and check that its "
    "drive is mounted"
)

_MAX_ATTEMPTS = 20
"""Largest number of attempts to list a store, or to describe a directory. An attempt fails if a
checkpoint is recycled during it."""


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """Summary of one directory of a store that is named like a checkpoint."""

    path: str
    """Path of the directory."""

    step: int
    """Number of optimizer steps taken; the number in the directory's name if the checkpoint is not
    valid."""

    generation: int
    """Counter of the store; the checkpoint with the highest generation is the newest. -1 if the
    checkpoint is not valid."""

    created: str
    """ISO 8601 time at which the seal began; empty if the checkpoint is not valid."""

    valid: bool
    """Whether the checkpoint is complete. Tensor data is not read; `Checkpoint.verify` reads it."""

    reason: str
    """Reason for people why the checkpoint is not valid; empty if it is valid."""

    num_parameters: int
    """Number of trainable elements; 0 if the checkpoint is not valid."""

    bytes: int
    """Size on disk in bytes; 0 if the checkpoint is not valid."""

    pins: tuple[str, ...] = ()
    """Names of the checkpoint's pins."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics that were given to ``checkpoint(metrics=...)``, by name."""

    not_seen: tuple[str, ...] = ()
    """Paths of parts of owners that are not seen on this node, if several ranks made the
    checkpoint. Their parameters and bytes are not counted."""

    store: str = ""
    """Identity of the store that sealed the checkpoint; empty if the checkpoint is not valid."""

    parameters_only: bool = False
    """Whether the checkpoint has given up its state, so that no training can go on from it."""


def list_checkpoints(
    store: str | os.PathLike[str],
    *,
    parts: PartDirectories = None,
    backend: Backend | None = None,
) -> list[CheckpointInfo]:
    """Describe every directory of a store that is named like a checkpoint, the newest last.

    The list is in the order of generations, whatever the steps are. A checkpoint that is not valid
    has no generation: it comes before the first valid checkpoint that has a higher step.

    This may run beside a process that trains in the store. Checkpoints that are recycled meanwhile
    are left out.

    Args:
        store: Directory of the store; the first one, if there are several.
        parts: Directories of the parts on other drives, as in `open_checkpoint`.
        backend: Storage backend of the store; the local file system by default.

    Raises:
        CheckpointNotFoundError: Nothing exists at `store`.
        CheckpointError: `store` is not a store.
        UnreadableError: Something could not be read, which says nothing about its content.
    """
    directory = os.path.abspath(os.fsdecode(store))
    with given_or_local(backend) as storage:
        attempts_left = _MAX_ATTEMPTS
        while True:
            paths = checkpoints_of(storage, directory)
            with reading():
                pins = read_pins(storage, directory)
            if pins.failures:
                raise unreadable(pins.failures[0])
            found = [_describe_unchanged(storage, path, parts, pins) for path in paths]
            attempts_left -= 1
            # A checkpoint that has taken the place of a recycled one has not been looked at yet.
            if None not in found or not attempts_left:
                return _in_order([info for info in found if info is not None])


def checkpoints_of(backend: Backend, directory: str) -> list[str]:
    """Return the paths in a store that are named like checkpoints, by rising step.

    Raises:
        CheckpointNotFoundError: Nothing exists at `directory`.
        CheckpointError: `directory` is not a store.
        UnreadableError: The directory could not be read.
    """
    stat = stat_given_path(backend, directory)
    if stat is None:
        raise CheckpointNotFoundError(errno.ENOENT, _NO_STORE, directory)
    if stat.kind != "directory":
        raise CheckpointError(f"{directory}: {kind_of(stat)}, expected the directory of a store")
    with reading():
        names = backend.list_dir(directory)
        paths = checkpoint_paths(backend, directory)
    if MANIFEST_NAME in names:
        raise CheckpointError(
            f"{directory}: this is a checkpoint; its store is {os.path.dirname(directory)}"
        )
    if not paths and LOCK_NAME not in names:
        raise CheckpointError(
            f"{directory}: not a store: it has neither a {LOCK_NAME} file nor a checkpoint; "
            f"{owners_here(backend, directory) or stores_below(backend, directory)}"
        )
    return paths


def list_unnamed_parts(
    store: str | os.PathLike[str],
    *,
    parts: PartDirectories = None,
    backend: Backend | None = None,
) -> list[str]:
    """Return the paths of sealed parts of owners that no checkpoint needs and the ranks do not use.

    Parts that are being written are left out. So is one part of each owner for each slot of the
    first rank that is no checkpoint: the ranks write the next step into it. The result is empty if
    the manifest of a checkpoint cannot be read, because that checkpoint may name any part.

    Args:
        store: Directory of the store.
        parts: Further directories of the store to search for owners.
        backend: Storage backend of the store; the local file system by default.

    Raises:
        UnreadableError: Something could not be read.
    """
    directory = os.path.abspath(os.fsdecode(store))
    with given_or_local(backend) as storage, reading():
        num_spare = sum(map(is_slot_name, storage.list_dir(directory)))
        try:
            paths = checkpoint_paths(storage, directory)
            manifests = [decode_manifest(storage, path) for path in paths]
        except CheckpointError:
            return []
        stores = {manifest.store_id for manifest in manifests}
        named = {(r.owner, r.digest) for manifest in manifests for r in manifest.owners}
        owners = {owner for owner, _ in named}
        given = [os.path.abspath(os.fsdecode(part)) for part in parts or ()]
        found: list[str] = []
        for one in dict.fromkeys([directory, *given]):
            for number, owner in owner_directories(storage, one).items():
                unnamed = [
                    (part.header.generation, part.path)
                    for part in parts_of_owner(storage, owner)
                    if part.header is not None
                    and part.header.store_id in stores
                    and (part.owner, part.header.digest) not in named
                ]
                found += [path for _, path in sorted(unnamed)[num_spare * (number in owners) :]]
        return found


def _describe_unchanged(
    backend: Backend, path: str, parts: PartDirectories, pins: FoundPins
) -> CheckpointInfo | None:
    """Describe a directory, anew if it is replaced meanwhile; return None if it is recycled.

    Listing takes no lock. If a training process renames the directory and rewrites it while it is
    read, the description does not fit the checkpoint that was sealed. So a description counts only
    if the path names the same directory before and after it is made.
    """
    for _ in range(_MAX_ATTEMPTS):
        before = backend.stat(path)
        if before is None:
            return None
        info = failure = None
        try:
            info = _describe(backend, path, parts, pins)
        except UnreadableError as error:
            failure = error
        after = backend.stat(path)
        if after is not None and after.inode == before.inode:
            if failure is not None:
                raise failure
            return info
    return None


def _in_order(infos: list[CheckpointInfo]) -> list[CheckpointInfo]:
    """Sort by generation. An invalid checkpoint has none and is placed by its step."""
    ordered = sorted((i for i in infos if i.valid), key=lambda info: info.generation)
    for info in sorted((i for i in infos if not i.valid), key=lambda info: info.step):
        later = (n for n, other in enumerate(ordered) if other.step > info.step)
        ordered.insert(next(later, len(ordered)), info)
    return ordered


def _describe(
    backend: Backend, path: str, parts: PartDirectories, pins: FoundPins
) -> CheckpointInfo:
    step = int(os.path.basename(path)[5:])
    try:
        manifest = read_in_store(backend, path, parts)
        return info_of(backend, path, manifest, parts, pins)
    except CheckpointError as error:
        return CheckpointInfo(path, step, -1, "", False, str(error), 0, 0, pins.names_at(path))


def info_of(
    backend: Backend, path: str, manifest: Manifest, parts: PartDirectories, pins: FoundPins
) -> CheckpointInfo:
    """Describe a checkpoint whose manifest has been read and checked.

    Args:
        backend: Backend through which the checkpoint is read.
        path: Directory of the checkpoint.
        manifest: Manifest of the checkpoint.
        parts: Directories on the other drives, as for `open_checkpoint`.
        pins: Pins of the store.
    """
    checkpoint = Checkpoint(backend, path, manifest, parts)
    owners = checkpoint.owners if manifest.owners else []
    files = checkpoint.files
    return CheckpointInfo(
        path,
        manifest.step,
        manifest.generation,
        manifest.created,
        True,
        "",
        checkpoint.num_parameters,
        sum(files.values()),
        pins.names_of(path, manifest),
        dict(manifest.metrics),
        tuple(owner.path for owner in owners if owner.table is None),
        manifest.store_id,
        not manifest.has_state,
    )
