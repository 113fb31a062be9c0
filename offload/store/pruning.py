"""Pruning: removal of expired checkpoints and leftover slots, in a store that no process uses.

Importing this module does not import torch.

Usually a user has removed a checkpoint by hand and has forgotten its parts on further drives. But
the parts may also belong to the store that this one is a copy of. Therefore only a process that
trains in the store rewrites them; pruning leaves them alone.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

from gds import Backend
from gds.opening import given_or_local
from offload.checkpoint.file_check import PartDirectories
from offload.checkpoint.listing import checkpoints_of
from offload.checkpoint.opening import open_checkpoint
from offload.checkpoint.owner_parts import owner_directories
from offload.checkpoint.reading import (
    are_only_recorded,
    decode_manifest,
)
from offload.errors import (
    CheckpointError,
    DamagedError,
    MetricError,
    PinError,
    StoreError,
    StoreLockedError,
    UnreadableError,
    writing,
)
from offload.format.manifest import Manifest
from offload.format.names import LOCK_NAME
from offload.format.unreadable import as_unreadable
from offload.retention.pins import read_pins
from offload.retention.policy import Record, Retention, metrics_of
from offload.store.claims import unnamed_parts
from offload.store.owner_store import remove_unnamed_parts
from offload.store.shared import SharedStore
from offload.store.slots.part_pool import PartLeftovers
from offload.store.space import file_bytes
from offload.store.store import Store
from offload.store.writer_lock import who_holds
from offload.units import part_options, seen_from


@dataclass(frozen=True, slots=True)
class Pruned:
    """One directory that was removed, or would be."""

    path: str
    bytes: int
    """Size in bytes of the files in the directory, and in the parts if it is a checkpoint."""


@dataclass(frozen=True, slots=True)
class PruneReport:
    """Directories that pruning removed, or would remove, and directories that stay."""

    checkpoints: tuple[Pruned, ...]
    """Checkpoints that neither the policy nor a pin keeps, with their parts on other drives."""

    leftovers: tuple[Pruned, ...]
    """Slots and parts that belong to no checkpoint. A process that has ended left them."""

    kept: tuple[str, ...]
    """Paths of the checkpoints that stay."""

    being_read: tuple[str, ...]
    """Paths of the checkpoints that stay only because a reader holds them."""

    refused: tuple[tuple[str, str], ...]
    """Paths of unusable directories named like checkpoints, each with the reason. They are left
    alone."""

    verified: bool = False
    """Whether every byte of `kept` was read and compared with its digest before anything was
    removed."""

    unnamed: tuple[tuple[str, str], ...] = ()
    """Paths of sealed parts on other drives that no checkpoint here names, each with the reason why
    it is left alone."""

    @property
    def bytes(self) -> int:
        """Number of bytes that were freed, or would be."""
        return sum(removed.bytes for removed in (*self.checkpoints, *self.leftovers))


class KeepAll(Retention):
    """Policy that keeps all checkpoints."""

    def kept(self, records: Sequence[Record]) -> set[int]:
        """Return all generations."""
        return {record.generation for record in records}


def prune(
    store: str | os.PathLike[str],
    policy: Retention | None = None,
    *,
    dry_run: bool = False,
    verify: bool = False,
    progress: Callable[[int, int], None] | None = None,
    parts: PartDirectories = None,
    backend: Backend | None = None,
) -> PruneReport:
    """Remove checkpoints that a policy does not keep, and slots that ended processes have left.

    Checkpoints are withdrawn durably, as in training, before any of their files is removed, because
    power may be lost at any moment. The newest checkpoint and pinned checkpoints always stay.
    Unusable checkpoints stay as they are.

    Args:
        store: Directory of the store; the first one, if there are several.
        policy: Policy that selects the checkpoints to keep. None keeps all checkpoints, and removes
            leftovers only.
        dry_run: Change nothing, and only report what would be removed.
        verify: Read every byte of the kept checkpoints before anything is removed, and remove
            nothing if one of them is damaged.
        progress: Function that is called while a checkpoint is verified, with the number of its
            bytes checked so far and the total number of its bytes.
        parts: Directories of the store on further drives, in the store's order. They must be given
            if the store has any: the directories that the manifests name may belong to the store
            that this one is a copy of.
        backend: Backend of all directories; the local file system by default.

    Raises:
        StoreLockedError: A process is training in the store.
        CheckpointNotFoundError: The path `store` does not exist.
        CheckpointError: The path `store` is not a store.
        PinError: A pin cannot be read.
        MetricError: The policy ranks by a metric that none of the store's checkpoints has.
        DamagedError: With `verify`, a kept checkpoint is damaged.
        UnreadableError: With `verify`, a checkpoint could not be read, or parts of it are in
            directories that were not given. This says nothing about its content.
        UnwritableError: This user may not write to the store.
        StoreError: The store has further directories that were not given; or a given directory does
            not exist; or it belongs to a store that has gone on, and that this store is a copy of.
        gds.StorageError: A file could not be read or removed, or a checkpoint could not be
            withdrawn.
    """
    directory = os.path.abspath(store)
    with given_or_local(backend) as storage:
        others, newest = _others(storage, directory, parts)
        given = [os.path.abspath(part) for part in parts or ()]
        with closing(_open(storage, directory, others, policy or KeepAll())) as opened:
            _require_metrics(opened, policy)
            owners = [] if newest is None or not newest.owners else [directory, *given]
            if verify:
                _require_whole(storage, opened, given, progress)
            return _prune(storage, opened, others, newest, owners, dry_run=dry_run, verified=verify)


def _others(
    backend: Backend, directory: str, parts: PartDirectories
) -> tuple[list[str], Manifest | None]:
    """Return the store's directories on further drives, and its newest manifest or None.

    Raises the errors of `prune`.
    """
    paths = checkpoints_of(backend, directory)
    manifests = []
    for path in paths:
        try:
            manifests.append(decode_manifest(backend, path))
        except CheckpointError:
            continue  # opening the store reports it
    newest = max(manifests, key=lambda manifest: manifest.generation, default=None)
    if newest is not None and are_only_recorded(newest, parts):
        recorded = [part.directory for part in newest.parts]
        raise StoreError(
            errno.EINVAL,
            "this store has further directories, which must be named to prune them. Its newest "
            f"checkpoint names them: {part_options(recorded)}. Pass these options if the store is "
            "still in these directories. If this is a copy, they are the directories of the "
            "original: pass --part with each of the copy's own, in the same order",
            directory,
        )
    others = [os.path.abspath(part) for part in parts or ()]
    for other in others:
        if backend.stat(other) is None:
            raise StoreError(
                errno.ENOENT,
                "this directory, given with --part, does not exist; mount the drive, or pass its "
                "present path",
                other,
            )
    if newest is not None and newest.owners:
        others = []  # the given directories are searched for parts of owners
    if unreadable := read_pins(backend, directory).unreadable:
        raise PinError(
            "nothing is removed, because it is not known which checkpoints are pinned: "
            f"{unreadable[0]}"
        )
    return others, newest


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
            shared=SharedStore(),
        )
    except StoreLockedError as error:
        holder = who_holds(backend, directory)
        raise StoreLockedError(
            error.errno,
            f"a process is training in this store{f' ({holder})' if holder else ''}. It recycles "
            "what its own retention does not "
            f"keep; to prune, stop it first (`fuser -v {directory}/{LOCK_NAME}` shows the process)",
            error.filename,
        ) from None


def _require_metrics(store: Store, policy: Retention | None) -> None:
    """Refuse a policy that ranks by a metric that no checkpoint has.

    The name of the metric is probably misspelt, and the policy would rank no checkpoint.
    """
    given = {name for checkpoint in store.keeping.current for name in checkpoint.manifest.metrics}
    for metric in metrics_of(policy) if policy is not None and store.keeping.current else ():
        if metric not in given:
            names = ", ".join(map(repr, sorted(given)))
            have = f"{'these have' if len(given) > 1 else 'theirs is'} {names}"
            raise MetricError(
                f"{store.directory}: no checkpoint has the metric {metric!r}; "
                f"{have if given else 'they have none'}. Nothing was removed: rank by a metric "
                "that the checkpoints have, or by none"
            )


def _require_whole(
    backend: Backend,
    store: Store,
    given: list[str],
    progress: Callable[[int, int], None] | None,
) -> None:
    """Verify every byte of the kept checkpoints; the store's lock prevents changes meanwhile."""
    expired = {checkpoint.path for checkpoint in store.keeping.expired()}
    damaged: list[str] = []
    with as_unreadable("Nothing was removed"):
        for path in [c.path for c in store.checkpoints if c.path not in expired]:
            with open_checkpoint(path, parts=given, backend=backend) as opened:
                report = opened.verify(progress)
            if report.problems:
                damaged.append(f"{path}: damaged: {seen_from(path, report.problems[0])}")
            elif report.not_seen:
                raise UnreadableError(
                    errno.ENOENT,
                    f"{seen_from(path, report.not_seen[0])} is not in the directories that were "
                    "given, so it could not be read: name all directories of the ranks with "
                    "--part. If they are on other nodes, verify them there, and prune without "
                    "--verify",
                    path,
                )
            elif report.unreadable:
                raise UnreadableError(
                    errno.EIO,
                    f"could not be read ({seen_from(path, report.unreadable[0])}), so it is not "
                    "known whether its content is damaged: check the drive (dmesg), and try again",
                    path,
                )
    if damaged:
        raise DamagedError(
            f"{'; '.join(damaged)}. {'It' if len(damaged) == 1 else 'They'} would be kept, so "
            f"nothing was removed: run `offload verify --quarantine {store.directory}`, and prune "
            "again. Damaged checkpoints are then no longer among those that are kept"
        )


def _prune(
    backend: Backend,
    store: Store,
    others: list[str],
    newest: Manifest | None,
    owners: Sequence[str],
    *,
    dry_run: bool,
    verified: bool,
) -> PruneReport:
    slots, parts = store.leftovers()
    unnamed = left_alone(parts, newest, store.directory)
    expired = {
        checkpoint.path: Pruned(
            checkpoint.path,
            file_bytes(
                backend,
                checkpoint.path,
                *(  # without state it has no parts
                    f"{other}/{part.name}"
                    for other, part in zip(others, checkpoint.manifest.parts, strict=False)
                ),
            ),
        )
        for checkpoint in store.keeping.expired()
    }
    removable = [*slots, *(path for _, path in parts.removable)]
    removable += _unnamed_parts(backend, store, owners)
    leftovers = [Pruned(path, file_bytes(backend, path)) for path in removable]
    being_read: tuple[str, ...] = ()
    if not dry_run:
        with writing(store.directory):
            store.prune()
            for directory in owners:
                remove_unnamed_parts(
                    backend,
                    directory,
                    store_id=store.store_id,
                    named=store.named_parts(),
                    served=(),
                )
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
        verified=verified,
        unnamed=unnamed,
    )


def _unnamed_parts(backend: Backend, store: Store, directories: Sequence[str]) -> list[str]:
    """Return the paths of parts of owners in some directories that no kept checkpoint names."""
    expired = {checkpoint.path for checkpoint in store.keeping.expired()}
    named = store.named_parts(leaving_out=expired)
    return [
        path
        for directory in directories
        for owner in owner_directories(backend, directory).values()
        for path in unnamed_parts(backend, owner, store.store_id, named)
    ]


_REASON = (
    "it is sealed for this store, but no checkpoint here names it. If one was removed by hand, "
    "remove this part as well; training in this store uses it again"
)


def left_alone(
    parts: PartLeftovers, newest: Manifest | None, directory: str
) -> tuple[tuple[str, str], ...]:
    """Return the paths of unnamed parts, each with the reason why it is left alone.

    Raises:
        StoreError: A part is newer than all checkpoints, counting unusable ones. Its directory
            probably belongs to another store, whose checkpoints must not be withdrawn from here.
    """
    for path, generation in parts.generations.items():
        if newest is not None and generation > newest.generation:
            raise StoreError(
                errno.EINVAL,
                f"this part is of generation {generation}, and the newest checkpoint in "
                f"{directory} is of generation {newest.generation}. If {directory} is a copy, "
                "this is a directory of the original, which has been trained further: pass --part "
                "with the copy's own directories. If this is the right directory, a newer "
                "checkpoint was removed by hand, or was never finished: then remove this part as "
                "well. Nothing has been changed",
                path,
            )
    return tuple((path, _REASON) for path in parts.unnamed)
