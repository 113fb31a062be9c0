"""Download of a checkpoint on request: it becomes an ordinary checkpoint of an ordinary store.

Each owner of state gets its part back as it was sealed. So ranks continue from the checkpoint as
from one of their own, with as many ranks as made it or with another number.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass

from gds import Backend
from gds.opening import given_or_local
from offload.checkpoint.checkpoint import Checkpoint
from offload.errors import DamagedError, StoreError, TierError
from offload.format.manifest import Manifest
from offload.format.names import TRAIN_STATE_NAME
from offload.store.pruning import KeepAll
from offload.store.shared import SharedStore
from offload.store.store import Store
from offload.tiers.catalog import TierCopy, find_copy, read_manifest, whats_wrong
from offload.tiers.download import Download, on_drives
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
        wrong, marker = whats_wrong(objects, copy), copy.marker
        if wrong or marker is None:
            raise DamagedError(f"{copy.url}: {wrong}{_older(objects, address, copy, step)}")
        manifest = on_drives(read_manifest(objects, copy), 1 + len(parts), copy)
        storage = resources.enter_context(given_or_local(backend))
        others = [(storage, os.path.abspath(os.fsdecode(part))) for part in parts]
        path = os.path.abspath(os.fsdecode(directory))
        owners = {reference.owner: path for reference in manifest.owners}
        store = resources.enter_context(
            closing(
                Store(
                    storage,
                    os.fsdecode(directory),
                    others,
                    keep=KeepAll(),  # a download removes none
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
        download = resources.enter_context(
            closing(
                Download(
                    objects,
                    copy,
                    manifest,
                    storage,
                    store.directory,
                    num_transfers=num_transfers,
                    progress=progress,
                )
            )
        )
        download.reserve(store)
        download.fetch_train_state()
        download.fetch_model()
        download.fetch_state()
        download.seal_parts()
        download.publish(download.tell_references())
        download.published()
        return PullReport(
            store.sealing.path_of(manifest.step),
            copy.url,
            manifest.step,
            False,
            download.bytes_fetched,
            download.bytes_kept,
            time.monotonic() - began_s,
        )


def _older(objects: Objects, address: TierAddress, copy: TierCopy, step: int | None) -> str:
    """Return advice to take the copy before a damaged one, if there is one and none was named."""
    with suppress(TierError):
        older = find_copy(objects, address, without=[copy.url])
        if step is None and older.marker is not None:
            return f". The copy before it is that of --step {older.marker.step}"
    return ""


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
