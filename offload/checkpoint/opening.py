"""Opening: find the checkpoint that a path means, and lock it against being recycled."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from gds import Backend, StorageError
from gds.contract import Lock
from gds.opening import given_or_local
from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.file_check import PartDirectories, kind_of
from offload.checkpoint.owner_parts import (
    find_owner_parts,
    lock_owner_parts,
    owner_directories,
    parts_of_owner,
)
from offload.checkpoint.reader_lock import lock_for_reading, recycled
from offload.checkpoint.reading import (
    check_name,
    check_unlocked,
    checkpoint_paths,
    decode_manifest,
    read_in_store,
    read_manifest,
    refuse_link,
    stat_given_path,
)
from offload.errors import CheckpointError, CheckpointNotFoundError, StoreBusyError, UnreadableError
from offload.format.manifest import Manifest
from offload.format.names import (
    LOCK_NAME,
    MANIFEST_NAME,
    checkpoint_name,
    is_checkpoint_path,
    owner_number,
    step_of,
)
from offload.format.unreadable import reading
from offload.units import grouped, seen_from

_MAX_ATTEMPTS = 100
"""Largest number of attempts to lock the newest checkpoint of a store. An attempt fails if the
checkpoint is recycled before it is locked."""


@dataclass(frozen=True, slots=True)
class _PassedOver:
    """A directory of a store that is named like a checkpoint and is not usable."""

    path: str
    inode: int
    """Inode of the directory, by which it is recognized later."""

    generation: int | None
    """Generation of the checkpoint; None if its manifest cannot be read or its directory has a
    wrong name."""

    reason: str
    """Reason why the checkpoint is not usable."""


def open_checkpoint(
    path: str | os.PathLike[str],
    *,
    parts: PartDirectories = None,
    even_quarantined: bool = False,
    backend: Backend | None = None,
) -> Checkpoint:
    """Open a checkpoint for reading, safely beside a process that is training.

    If the newest checkpoint of a store is damaged, the one before it is opened, with a warning.

    Args:
        path: Directory of a checkpoint, or of a store, which means its newest usable checkpoint.
        parts: Directories of the state on several drives, if they have moved: all but the first, in
            the store's order.
        even_quarantined: Whether to open a checkpoint that is marked as damaged, or whose directory
            is named for another step than its own. This serves `Checkpoint.verify`, and users who
            want to save data from a damaged checkpoint. If `path` is a store, its marked and
            misnamed checkpoints are passed over in any case.
        backend: Storage backend of the checkpoint; the local file system by default.

    Raises:
        CheckpointNotFoundError: Nothing exists at `path`.
        CheckpointError: There is no usable checkpoint. The message says why.
        RecycledError: A training process recycled the checkpoint while it was being opened. Open
            the store's newest one instead.
        StoreBusyError: A writer is recycling or replacing the checkpoint at this moment.
        UnreadableError: Something could not be read, which says nothing about its content.
    """
    return _open(
        os.fsdecode(path), parts, backend, need_parts=True, even_quarantined=even_quarantined
    )


def open_for_parameters(
    path: str | os.PathLike[str], *, backend: Backend | None = None
) -> Checkpoint:
    """Open a checkpoint as `open_checkpoint` does, but look at the first drive only."""
    return _open(os.fsdecode(path), None, backend, need_parts=False)


def _open(
    path: str,
    parts: PartDirectories,
    backend: Backend | None,
    *,
    need_parts: bool,
    even_quarantined: bool = False,
) -> Checkpoint:
    with ExitStack() as resources:
        storage = resources.enter_context(given_or_local(backend))
        found, manifest, (lock, *locks), passed_over = _find_and_lock(
            storage, path, parts, need_parts=need_parts, even_quarantined=even_quarantined
        )
        for one in locks:
            resources.callback(one.release)
        opened = Checkpoint(
            storage, found, manifest, parts, lock=lock, resources=resources.pop_all()
        )
    try:
        _warn_passed_over(storage, passed_over, parts, need_parts=need_parts)
    except BaseException:  # filters may turn warnings into errors
        opened.close()
        raise
    return opened


def _find_and_lock(
    backend: Backend,
    path: str,
    parts: PartDirectories,
    *,
    need_parts: bool,
    even_quarantined: bool,
) -> tuple[str, Manifest, list[Lock], tuple[_PassedOver, ...]]:
    """Find, lock and read the checkpoint that a path means; search again if it is recycled."""
    attempts_left = _MAX_ATTEMPTS
    while True:
        present = _checkpoints_at(backend, path)
        attempts_left -= 1
        try:
            return _find_and_lock_once(
                backend, path, parts, need_parts=need_parts, even_quarantined=even_quarantined
            )
        except (
            CheckpointError,
            CheckpointNotFoundError,
            StoreBusyError,
            StorageError,
        ) as error:
            # A store in training always has a newest checkpoint. If it was recycled during the
            # search, another one has taken its place, and the search starts again.
            now = _checkpoints_at(backend, path)
            if not attempts_left or present == now:
                raise
            if is_checkpoint_path(path) and not now:
                raise recycled(os.path.abspath(path)) from error


def _warn_passed_over(
    backend: Backend,
    passed_over: Sequence[_PassedOver],
    parts: PartDirectories,
    *,
    need_parts: bool,
) -> None:
    """Warn about each checkpoint that may be newer, still exists and is not usable.

    A checkpoint that has just been recycled gets no warning.
    """
    for one in passed_over:
        try:
            read_in_store(backend, one.path, parts, need_parts=need_parts)
        except CheckpointError:
            now = backend.stat(one.path)
            if now is not None and now.inode == one.inode:
                reason = seen_from(one.path, one.reason)
                warnings.warn(f"not using {one.path}: {reason}", RuntimeWarning, stacklevel=4)


def _checkpoints_at(backend: Backend, path: str) -> dict[str, int]:
    """Return the inode of each checkpoint that a path may mean, by the checkpoint's path.

    The path may be that of one checkpoint, or of a store. The result is empty if the path cannot be
    read.
    """
    stats: dict[str, int] = {}
    path = os.path.abspath(path)
    try:
        named = [path] if is_checkpoint_path(path) else checkpoint_paths(backend, path)
        for checkpoint in named:
            if (stat := backend.stat(checkpoint)) is not None:
                stats[checkpoint] = stat.inode
    except StorageError:
        return {}
    return stats


def _find_and_lock_once(
    backend: Backend,
    path: str,
    parts: PartDirectories,
    *,
    need_parts: bool,
    even_quarantined: bool,
) -> tuple[str, Manifest, list[Lock], tuple[_PassedOver, ...]]:
    """Find, lock and read the checkpoint that a path means; fail if it is recycled meanwhile."""
    with reading():
        found, passed_over = _find(backend, path, parts, need_parts=need_parts)
        lock = lock_for_reading(backend, found)
    try:
        manifest = read_manifest(
            backend, found, parts, need_parts=need_parts, even_quarantined=even_quarantined
        )
        if not even_quarantined:
            check_name(found, manifest)
        locks = _lock_owners(backend, found, manifest, parts) if need_parts else []
    except BaseException:
        lock.release()
        raise
    return found, manifest, [lock, *locks], passed_over


def _lock_owners(
    backend: Backend, path: str, manifest: Manifest, parts: PartDirectories
) -> list[Lock]:
    """Keep the parts of owners that are seen here from being rewritten; return the locks."""
    found = find_owner_parts(backend, path, manifest, parts, even_quarantined=True)
    return lock_owner_parts(backend, found)


def _find(
    backend: Backend, path: str, parts: PartDirectories = None, *, need_parts: bool = True
) -> tuple[str, tuple[_PassedOver, ...]]:
    """Return the checkpoint that a path means: the directory itself, or the newest in a store."""
    path = os.path.abspath(path)
    stat = stat_given_path(backend, path)
    if stat is None:
        others = other_checkpoints(backend, path)
        raise CheckpointNotFoundError(
            errno.ENOENT, f"there is no checkpoint or store here{others}", path
        )
    if stat.kind != "directory":
        raise CheckpointError(f"{path}: {kind_of(stat)}, expected a checkpoint or store directory")
    if backend.stat(f"{path}/{MANIFEST_NAME}") is not None:
        refuse_link(backend, path)
        return path, ()
    newest: tuple[int, str] | None = None
    refused: list[_PassedOver] = []
    for checkpoint in checkpoint_paths(backend, path):
        own = backend.stat(checkpoint)
        if own is None:
            continue  # recycled since the directory was listed
        generation = None
        try:
            manifest = decode_manifest(backend, checkpoint)
            check_name(checkpoint, manifest)
            generation = manifest.generation
            check_unlocked(backend, checkpoint, manifest, parts, need_parts=need_parts)
        except CheckpointError as error:
            refused.append(_PassedOver(checkpoint, own.inode, generation, str(error)))
        else:
            newest = max(newest or (-1, ""), (generation, checkpoint))
    if newest is None:
        reasons = grouped([(one.path, one.reason) for one in refused])
        why = "; ".join(reasons) or _what_is_missing(backend, path)
        raise CheckpointError(f"{path}: no usable checkpoint here: {why}")
    passed_over = (r for r in refused if r.generation is None or r.generation > newest[0])
    return newest[1], tuple(passed_over)


def _what_is_missing(backend: Backend, path: str) -> str:
    """Return the part of a message that says what a directory without checkpoints lacks."""
    missing = "it has no step-<N> directory"
    is_store = backend.stat(f"{path}/{LOCK_NAME}") is not None
    if is_checkpoint_path(path) and not is_store:
        return f"it has no {MANIFEST_NAME}, so it is not a complete checkpoint"
    if is_store:
        return missing
    return f"{missing}; {owners_here(backend, path) or stores_below(backend, path)}"


_MOST_LOOKED_AT = 100
"""Largest number of directories that are searched for stores."""

_MOST_SHOWN = 3
"""Largest number of names in a hint."""


def stores_below(backend: Backend, directory: str) -> str:
    """Return a hint at the stores directly below a directory, and at how to find deeper ones."""
    found = []
    try:
        names = backend.list_dir(directory)
    except StorageError:
        names = []
    for name in sorted(names)[:_MOST_LOOKED_AT]:
        try:
            stat = backend.stat(f"{directory}/{name}")
            inside = backend.list_dir(f"{directory}/{name}") if stat is not None else []
        except StorageError:
            continue
        if owner_number(name) is not None:
            continue  # parts of a store whose first directory is elsewhere
        if LOCK_NAME in inside or any(step_of(one) is not None for one in inside):
            found.append(name)
    if not found:
        return f"`offload verify --all {directory}` looks for stores below it"
    return (
        f"stores below it: {_shown(found)}. Give one of them, or read all with `offload verify "
        f"--all {directory}`"
    )


def owners_here(backend: Backend, directory: str) -> str:
    """Return what a directory has of a store whose first directory is elsewhere; empty if nothing.

    Every sealed part is named with its generation, and with the reason if it is not usable.
    """
    found: dict[str, list[str]] = {}
    try:
        for owner, path in owner_directories(backend, directory).items():
            for part in parts_of_owner(backend, path):
                if part.header is not None:
                    problem = f", not usable: {part.reason}" if part.reason else ""
                    found.setdefault(part.header.store_id, []).append(
                        f"owner-{owner}/{part.name} of generation {part.header.generation}{problem}"
                    )
    except (StorageError, UnreadableError):
        return ""
    if not found:
        return ""
    stores = "; ".join(f"store {store}: {', '.join(parts)}" for store, parts in found.items())
    return (
        f"it has parts that ranks of another host's store keep here ({stores}). The checkpoints "
        "that name them are in the store's first directory, on another host: look there"
    )


def other_checkpoints(backend: Backend, path: str) -> str:
    """Return a hint at the checkpoints beside a path; empty if there are none.

    The hint is also empty if the path is not named like a checkpoint.
    """
    store, name = os.path.split(path)
    if not name.startswith("step-"):
        return ""
    try:
        steps = sorted(step for n in backend.list_dir(store) if (step := step_of(n)) is not None)
    except StorageError:
        return ""
    if not steps:
        return ""
    names = [checkpoint_name(step) for step in steps[-_MOST_SHOWN:]]
    more = len(steps) - len(names)
    return f"; its store has {', '.join(names)}{f' and {more} older' if more else ''}"


def _shown(names: list[str]) -> str:
    more = len(names) - _MOST_SHOWN
    return ", ".join(names[:_MOST_SHOWN]) + (f" and {more} more" if more > 0 else "")
