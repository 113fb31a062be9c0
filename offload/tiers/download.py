"""Downloads: a checkpoint from a tier becomes an ordinary checkpoint of an ordinary store.

A download fills a free slot of the store, and the store publishes it as it publishes every
checkpoint: all data durable, then the manifest, then one rename. Until then nothing is offered. A
download that was interrupted leaves a slot, as a process does that was killed in a step. The next
one compares what the slot holds with the digests of the checkpoint, and asks only for the rest. So
there is no record that could be wrong.

Each owner gets its part back as it was sealed. So ranks continue from the checkpoint as from one of
their own, with as many ranks as made it or with another number.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

from gds import Backend
from gds.opening import given_or_local
from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.owner_parts import check_cover
from offload.errors import CheckpointError, DamagedError, StoreError, TierError
from offload.format.manifest import Manifest
from offload.format.names import TRAIN_STATE_NAME
from offload.format.shares.part_table import OwnerTable
from offload.retention.policy import Record, Retention
from offload.store.owners.slot import OwnerSlot
from offload.store.owners.store import OwnerStore
from offload.store.shared import SharedStore
from offload.store.slots.slot import Slot
from offload.store.store import Store
from offload.tiers.catalog import TierCopy, find_copy, read_manifest, read_tables, whats_wrong
from offload.tiers.contents import model_object, shard_object
from offload.tiers.filling import Download
from offload.tiers.marker import Marker
from offload.tiers.range_filling import RangeFilling
from offload.tiers.ranks.filling_shares import (
    Share,
    fill_shares,
    publish,
    reserve_part,
    reserve_slot,
    seal_part,
)
from offload.tiers.sending import NUM_TRANSFERS, Progress
from offload.tiers.services.address import TierAddress, parse_address, require_apart
from offload.tiers.services.objects import Objects
from offload.tiers.services.opening import DEFAULT_RETRY_S, DEFAULT_TIMEOUT_S, open_objects


@dataclass(frozen=True, slots=True)
class PullReport:
    """Result of a download."""

    path: str
    """Directory of the checkpoint."""

    url: str
    """URL of the copy that it was made from."""

    step: int

    already_there: bool
    """Whether the store had the checkpoint, so that nothing was fetched."""

    bytes_fetched: int
    """Number of bytes that this call fetched from the tier."""

    bytes_kept: int
    """Number of bytes that an earlier download of the same checkpoint had fetched."""

    seconds: float


class _KeepAll(Retention):
    """Policy that keeps all checkpoints: a download removes none."""

    def kept(self, records: Sequence[Record]) -> set[int]:
        """Return all generations."""
        return {record.generation for record in records}


def pull(
    url: str,
    directory: str | os.PathLike[str],
    *,
    parts: Sequence[str | os.PathLike[str]] = (),
    step: int | None = None,
    num_transfers: int = NUM_TRANSFERS,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    retry_s: float = DEFAULT_RETRY_S,
    allow_volatile: bool = False,
    allow_remote: bool = False,
    progress: Progress | None = None,
    backend: Backend | None = None,
) -> PullReport:
    """Download a checkpoint from a tier. A download that was interrupted goes on where it ended.

    The optimizer's `restore` then continues from the checkpoint as from any other. It may lie on
    another number of drives than before.

    Args:
        url: URL of the tier, which means its newest checkpoint, or of one copy in it.
        directory: Directory of the store: a new one, an empty one, or one with older checkpoints of
            the same store.
        parts: Further directories of the store, on other drives. A checkpoint of several ranks has
            none: all owners of its state get their parts in `directory`.
        step: Number of steps of the checkpoint; None for the newest.
        num_transfers: Number of transfers at a time. Each takes memory for one chunk.
        timeout_s: Seconds after which one request is given up.
        retry_s: Seconds for which a request that failed is tried again.
        allow_volatile: Accept a file system that loses its content at power-off.
        allow_remote: Accept a file system that another machine or a program serves.
        progress: Function that is called with the bytes done and the total.
        backend: Storage backend of the store; the local file system by default.

    Raises:
        TierNotFoundError: The tier has no complete copy of such a checkpoint.
        TierError: The tier cannot be used. The message says what to do.
        DamagedError: An object is missing, or has other bytes than were sent.
        StoreFullError: There is no room for the checkpoint. Nothing was fetched.
        StoreError: The directory is that of another store, has newer checkpoints, or is in use.
        gds.StorageError: The store cannot be written.
    """
    began_s = time.monotonic()
    address = parse_address(url)
    require_apart(address, [directory, *parts])
    with ExitStack() as resources:
        objects = resources.enter_context(
            open_objects(address, timeout_s=timeout_s, retry_s=retry_s)
        )
        copy = find_copy(objects, address, step)
        wrong = whats_wrong(objects, copy)
        if wrong:
            raise DamagedError(f"{copy.url}: {wrong}{_older(objects, address, copy, step)}")
        manifest = on_drives(read_manifest(objects, copy), 1 + len(parts), copy)
        owners = owners_in(manifest, directory)
        storage = resources.enter_context(given_or_local(backend))
        marker = copy.marker
        if marker is None:
            raise StoreError(errno.EINVAL, copy.reason, copy.url)
        others = [(storage, os.path.abspath(os.fsdecode(part))) for part in parts]
        store = resources.enter_context(
            closing(
                Store(
                    storage,
                    os.fsdecode(directory),
                    others,
                    keep=_KeepAll(),
                    train_state_bytes=marker.sizes[TRAIN_STATE_NAME],
                    allow_volatile=allow_volatile,
                    allow_remote=allow_remote,
                    store_id=manifest.store_id,
                    shared=SharedStore(owners) if owners else None,
                )
            )
        )
        present = _find_present(store, manifest)
        if present is not None:
            seconds = time.monotonic() - began_s
            return PullReport(present.path, copy.url, manifest.step, True, 0, 0, seconds)
        filling = RangeFilling(objects, copy, manifest, storage, num_transfers, progress)
        if owners:
            tables = read_tables(objects, copy, manifest)
            check_cover(copy.url, manifest, tables)
            path = OwnersDownload(filling, tables, marker, manifest, storage).run(
                store, allow_volatile=allow_volatile, allow_remote=allow_remote
            )
        else:
            path = Download(filling, marker, manifest).run(store)
        seconds = time.monotonic() - began_s
        return PullReport(
            path,
            copy.url,
            manifest.step,
            False,
            filling.bytes_fetched,
            filling.bytes_kept,
            seconds,
        )


def _older(objects: Objects, address: TierAddress, copy: TierCopy, step: int | None) -> str:
    """Return advice to take the copy before a damaged one, if there is one and none was named."""
    with suppress(TierError):
        older = find_copy(objects, address, without=[copy.url])
        if step is None and older.marker is not None:
            return f". The copy before it is that of --step {older.marker.step}"
    return ""


def on_drives(manifest: Manifest, num_drives: int, copy: TierCopy) -> Manifest:
    """Return the manifest of the same checkpoint on a number of drives."""
    if manifest.owners:
        if num_drives > 1:
            raise CheckpointError(
                f"{copy.url}: several ranks made this checkpoint, and all of it is downloaded into "
                "one directory: leave out the others"
            )
        return manifest
    layout = manifest.layout
    if len(layout.shares) != num_drives:
        layout = replace(layout, shares=(1,) * num_drives)
    return replace(manifest, layout=layout, parts=())


def _find_present(store: Store, manifest: Manifest) -> Checkpoint | None:
    """Return the checkpoint if the store has it already, or None if it can be added."""
    for path, reason in store.refused:
        raise StoreError(
            errno.EEXIST,
            f"the store has a checkpoint that is not usable, {os.path.basename(path)} ({reason}), "
            "so its order is not known: download into another directory",
            store.directory,
        )
    if store.store_id != manifest.store_id:
        raise StoreError(
            errno.EEXIST,
            f"these are checkpoints of another store ({store.store_id}, expected "
            f"{manifest.store_id}): download into another directory",
            store.directory,
        )
    for checkpoint in store.checkpoints:
        found = checkpoint.manifest
        if (found.generation, found.digests) == (manifest.generation, manifest.digests):
            return store.reader_of(checkpoint)
        if found.generation >= manifest.generation:
            raise StoreError(
                errno.EEXIST,
                f"the store has a checkpoint that is newer, or of another run: "
                f"{os.path.basename(checkpoint.path)} of generation {found.generation}, and this "
                f"one is of generation {manifest.generation}: download into another directory",
                store.directory,
            )
        if found.step == manifest.step:
            raise StoreError(
                errno.EEXIST,
                f"the store has another checkpoint of step {manifest.step}: download into another "
                "directory",
                store.directory,
            )
    return None


class _Owner(NamedTuple):
    """An owner besides the first: its parts, the one that is filled, and what that will hold."""

    store: OwnerStore
    table: OwnerTable
    part: OwnerSlot
    share: Share


class OwnersDownload:
    """Download of a checkpoint of several ranks.

    Args:
        filling: Fetches ranges of the copy.
        tables: Tables of the owners besides the first.
        marker: Marker of the copy.
        manifest: Manifest of the checkpoint.
        backend: Storage backend of the store.
    """

    def __init__(
        self,
        filling: RangeFilling,
        tables: Sequence[OwnerTable],
        marker: Marker,
        manifest: Manifest,
        backend: Backend,
    ) -> None:
        self._filling = filling
        self._tables = tables
        self._marker = marker
        self._manifest = manifest
        self._backend = backend
        filling.expect(marker.sizes[TRAIN_STATE_NAME])

    def run(self, store: Store, *, allow_volatile: bool, allow_remote: bool) -> str:
        """Fill a slot and a part for each owner, and publish them as one checkpoint.

        Args:
            store: Store of the first directory, which has been told of its owners.
            allow_volatile: Accept a file system that loses its content at power-off.
            allow_remote: Accept a file system that another machine or a program serves.

        Returns:
            Path of the checkpoint.

        The errors are those of `offload.tiers.download.pull`.
        """
        manifest = self._manifest
        with ExitStack() as resources:
            slot, share = reserve_slot(store, manifest, model_object(manifest, self._tables))
            try:
                owners = [
                    self._open(resources, store, table, allow_volatile, allow_remote)
                    for table in self._tables
                ]
                train_state = self._filling.train_state(self._marker, slot.train_state.size_bytes)
                shares = [share, *(one.share for one in owners)]
                fill_shares(self._filling, shares, self._marker.object_bytes)
                return self._publish(store, slot, owners, train_state)
            except BaseException:
                self._filling.end()
                if store.checkpoint_of(slot) is None:
                    store.release(slot)
                raise

    def _open(
        self,
        resources: ExitStack,
        store: Store,
        table: OwnerTable,
        allow_volatile: bool,
        allow_remote: bool,
    ) -> _Owner:
        """Reserve the part of an owner."""
        opened = resources.enter_context(
            closing(
                OwnerStore(
                    self._backend,
                    store.directory,
                    table.owner,
                    store_id=self._manifest.store_id,
                    allow_volatile=allow_volatile,
                    allow_remote=allow_remote,
                )
            )
        )
        part, share = reserve_part(opened, table, shard_object(table), store.named_parts())
        return _Owner(opened, table, part, share)

    def _publish(
        self, store: Store, slot: Slot, owners: Sequence[_Owner], train_state: bytes
    ) -> str:
        """Make everything durable, the parts of the owners first, and publish the checkpoint."""
        references = [
            seal_part(one.store, one.part, one.table, expected)
            for one, expected in zip(owners, self._manifest.owners, strict=True)
        ]
        stored = publish(store, slot, self._manifest, references, train_state)
        for one in owners:
            one.store.published(one.part)
        return stored.path


def owners_in(manifest: Manifest, directory: str | os.PathLike[str]) -> dict[int, str]:
    """Return the directory of each owner besides the first, if all are in one directory."""
    path = os.path.abspath(os.fsdecode(directory))
    return {reference.owner: path for reference in manifest.owners}
