"""What checkpoints a store has, in one line each. Writes nothing, and does not import torch."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from gds import Backend, PosixBackend
from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.nearby import stores_below
from offload.checkpoint.reading import (
    PartDirectories,
    checkpoint_paths,
    given_directory,
    kind_of,
    read_in_store,
)
from offload.errors import CheckpointError, CheckpointNotFoundError
from offload.format.manifest import Manifest
from offload.format.names import LOCK_NAME, MANIFEST_NAME
from offload.format.unreadable import reading, unreadable
from offload.retention.pins import FoundPins, read_pins

_NO_STORE = "there is no store here; give the directory= that the training was given"

_MOST_LOOKS = 20
"""At a store whose checkpoints are recycled each time before they have been looked at."""


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """One line about a directory of a store that is named like a checkpoint."""

    path: str
    step: int
    """Optimizer steps taken; from the directory's name where the manifest cannot be read."""

    generation: int
    """The highest is the newest; -1 where the manifest cannot be read."""

    created: str
    """ISO 8601; empty where the manifest cannot be read."""

    valid: bool
    """Whether it is complete; tensor data is not looked at (that is `Checkpoint.verify`)."""

    reason: str
    """Why it is not valid, for people."""

    num_parameters: int
    """Trainable elements."""

    bytes: int
    """Size on disk."""

    pins: tuple[str, ...] = ()
    """Names that it has been pinned by."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """What was given to ``checkpoint(metrics=...)``."""

    store: str = ""
    """Identity of the store that sealed it; empty where the manifest cannot be read."""


def list_checkpoints(
    store: str | os.PathLike[str],
    *,
    parts: PartDirectories = None,
    backend: Backend | None = None,
) -> list[CheckpointInfo]:
    """Describe every directory of a store that is named like a checkpoint, the newest last.

    They are in the order of their generations, whatever their steps are. One whose manifest cannot
    be read has no generation: it comes before the first one that has a higher step.

    May run beside a process that trains in the store: what is recycled meanwhile is left out.

    Args:
        store: The directory; the first one, if there are several.
        parts: As for `open_checkpoint`.
        backend: Where it is; the local file system by default.

    Raises:
        CheckpointNotFoundError: There is nothing at `store`.
        CheckpointError: It is something else than a store.
        UnreadableError: Something could not be read, which says nothing about what it holds.
    """
    owns_backend = backend is None
    backend = backend or PosixBackend()
    directory = os.path.abspath(os.fspath(store))
    try:
        looks_left = _MOST_LOOKS
        while True:
            paths = checkpoints_of(backend, directory)
            with reading():
                pins = read_pins(backend, directory)
            if pins.failures:
                raise unreadable(pins.failures[0])
            found = [_describe_unchanged(backend, path, parts, pins) for path in paths]
            looks_left -= 1
            # What has taken the place of one that was recycled has not been looked at.
            if None not in found or not looks_left:
                return _in_order([info for info in found if info is not None])
    finally:
        if owns_backend:
            backend.close()


def checkpoints_of(backend: Backend, directory: str) -> list[str]:
    """Return the directories in a store that are named like checkpoints, oldest step first.

    Raises:
        CheckpointNotFoundError: There is nothing at `directory`.
        CheckpointError: It is something else than a store.
        UnreadableError: It could not be read.
    """
    stat = given_directory(backend, directory)
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
            f"{stores_below(backend, directory)}"
        )
    return paths


def _describe_unchanged(
    backend: Backend, path: str, parts: PartDirectories, pins: FoundPins
) -> CheckpointInfo | None:
    """Describe a directory that was the same before and after; None if it has been recycled.

    Listing takes no lock: what was found while a training process renamed the directory away, and
    began to rewrite it, says nothing about what it held.
    """
    for _ in range(_MOST_LOOKS):
        before = backend.stat(path)
        if before is None:
            return None
        info = _describe(backend, path, parts, pins)
        after = backend.stat(path)
        if after is not None and after.inode == before.inode:
            return info
    return None


def _in_order(infos: list[CheckpointInfo]) -> list[CheckpointInfo]:
    """Sort by generation; what has none goes where its step says."""
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
    except CheckpointError as error:
        return CheckpointInfo(path, step, -1, "", False, str(error), 0, 0, pins.at(path))
    return info_of(backend, path, manifest, parts, pins)


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
    files = Checkpoint(backend, path, manifest, parts).files
    return CheckpointInfo(
        path,
        manifest.step,
        manifest.generation,
        manifest.created,
        True,
        "",
        manifest.layout.num_elements,
        sum(files.values()),
        pins.of(path, manifest),
        dict(manifest.metrics),
        manifest.store_id,
    )
