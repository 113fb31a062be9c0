"""Giving back the space of what nobody needs, where no process trains. Does not import torch."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass

from gds import Backend, PosixBackend
from offload.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    PinError,
    StoreError,
    StoreLockedError,
)
from offload.manifest import MANIFEST_NAME
from offload.pins import read_pins
from offload.reading import PartDirectories, checkpoint_paths, decode_manifest
from offload.retention import Record, Retention
from offload.slot import LOCK_NAME
from offload.store import Store


@dataclass(frozen=True, slots=True)
class Pruned:
    """One directory, and what becomes of it."""

    path: str
    bytes: int
    """Size on disk of the files in it."""


@dataclass(frozen=True, slots=True)
class PruneReport:
    """What was removed, or would be."""

    checkpoints: tuple[Pruned, ...]
    """That neither the policy nor a pin keeps; with what they have on other drives."""

    leftovers: tuple[Pruned, ...]
    """Slots and parts that are no checkpoints: of a process that has ended."""

    kept: tuple[str, ...]
    """Paths of the checkpoints that stay."""

    being_read: tuple[str, ...]
    """Paths of those that stay only because somebody reads them."""

    refused: tuple[tuple[str, str], ...]
    """Directories named like checkpoints that are not usable, and why. They are left alone."""

    @property
    def bytes(self) -> int:
        """What was given back, or would be."""
        return sum(removed.bytes for removed in (*self.checkpoints, *self.leftovers))


class _Everything(Retention):
    """Keep all."""

    def kept(self, records: Sequence[Record]) -> set[int]:
        return {record.generation for record in records}


def prune(
    store: str | os.PathLike[str],
    policy: Retention | None = None,
    *,
    dry_run: bool = False,
    parts: PartDirectories = None,
    backend: Backend | None = None,
) -> PruneReport:
    """Remove what a policy does not keep, and the slots that no process works in any more.

    Checkpoints are withdrawn as training does it, durably, before anything of them is removed:
    power may be lost at any moment. The newest and those that are pinned always stay, and so does
    what is not usable as it is.

    Args:
        store: The directory; the first one, if there are several.
        policy: What to keep; None keeps all checkpoints and removes leftovers only.
        dry_run: Change nothing, only say what would be done.
        parts: Where the directories on further drives are, if they have moved.
        backend: Where all of them are; the local file system by default.

    Raises:
        StoreLockedError: A process is training in the store.
        CheckpointNotFoundError: There is nothing at `store`.
        CheckpointError: It is something else than a store.
        PinError: A pin cannot be read.
        StoreError: A directory on a further drive is not there.
        gds.StorageError: Something could not be read, withdrawn or removed.
    """
    directory = os.path.abspath(store)
    inner = backend or PosixBackend()
    try:
        others = _others(inner, directory, parts)
        opened = _open(inner, directory, others, policy or _Everything())
        try:
            return _prune(inner, opened, others, dry_run=dry_run)
        finally:
            opened.close()
    finally:
        if backend is None:
            inner.close()


def _others(backend: Backend, directory: str, parts: PartDirectories) -> list[str]:
    """Return the store's directories on further drives, having checked that all are there."""
    stat = backend.stat(directory)
    if stat is None or stat.kind != "directory":
        raise CheckpointNotFoundError(errno.ENOENT, "there is no store here", directory)
    names = backend.list_dir(directory)
    paths = checkpoint_paths(backend, directory)
    if MANIFEST_NAME in names or not (paths or LOCK_NAME in names):
        raise CheckpointError(
            f"{directory}: not a store; give the directory that checkpoints are in"
        )
    others = [os.path.abspath(part) for part in parts or ()]
    if parts is None:
        manifests = []
        for path in paths:
            try:
                manifests.append(decode_manifest(backend, path))
            except CheckpointError:
                continue  # the store says so itself
        newest = max(manifests, key=lambda manifest: manifest.generation, default=None)
        others = [part.directory for part in newest.parts] if newest else []
    for other in others:
        if backend.stat(other) is None:
            raise StoreError(
                errno.ENOENT,
                "a part of this store is not there; mount the drive, or say where it is now with "
                "--part",
                other,
            )
    if unreadable := read_pins(backend, directory).unreadable:
        raise PinError(f"nothing is removed, since nobody knows what is pinned: {unreadable[0]}")
    return others


def _open(backend: Backend, directory: str, others: list[str], policy: Retention) -> Store:
    try:
        return Store(
            backend,
            directory,
            [(backend, other) for other in others],
            keep=policy,
            train_state_bytes=0,
            allow_volatile=True,
            allow_remote=True,
        )
    except StoreLockedError as error:
        raise StoreLockedError(
            error.errno,
            "a process is training in this store. It recycles what its own retention does not "
            "keep; to prune, stop it first",
            error.filename,
        ) from error


def _prune(backend: Backend, store: Store, others: list[str], *, dry_run: bool) -> PruneReport:
    expired = {
        checkpoint.path: Pruned(
            checkpoint.path,
            _bytes_in(
                backend,
                checkpoint.path,
                *(
                    f"{other}/{part.name}"
                    for other, part in zip(others, checkpoint.manifest.parts, strict=True)
                ),
            ),
        )
        for checkpoint in store.keeping.expired()
    }
    leftovers = [Pruned(path, _bytes_in(backend, path)) for path in store.leftovers()]
    being_read: tuple[str, ...] = ()
    if not dry_run:
        store.prune()
        being_read = tuple(c.path for c in store.checkpoints if c.path in expired)
        leftovers = [removed for removed in leftovers if backend.stat(removed.path) is None]
    return PruneReport(
        checkpoints=tuple(p for path, p in expired.items() if path not in being_read),
        leftovers=tuple(leftovers),
        kept=tuple(
            c.path for c in store.checkpoints if c.path not in expired or c.path in being_read
        ),
        being_read=being_read,
        refused=tuple(store.refused),
    )


def _bytes_in(backend: Backend, *directories: str) -> int:
    total = 0
    for directory in directories:
        for name in backend.list_dir(directory) if backend.stat(directory) else ():
            stat = backend.stat(f"{directory}/{name}")
            total += stat.size_bytes if stat else 0
    return total
