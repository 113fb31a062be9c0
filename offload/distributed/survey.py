"""What this rank sees in the directory of a store, before any rank has opened it."""

from __future__ import annotations

import os
import socket
import uuid
from pathlib import Path

from gds import Backend
from offload.checkpoint.owner_parts import owner_directories, parts_of_owner
from offload.checkpoint.reading import check_name, checkpoint_paths, decode_manifest
from offload.distributed.agreement.sights import (
    CheckpointSight,
    OwnerSight,
    PartSight,
    Sight,
    StoreSight,
)
from offload.errors import CheckpointError, OffloadError, reason_of
from offload.format.names import step_of
from offload.store.store_id import read_store_id


def survey(backend: Backend, directory: str, *, fresh: bool) -> Sight:
    """Return what this rank sees; an error that it meets is part of the result.

    Nothing is changed, and nothing is locked: another process may be writing the store.

    Args:
        backend: Backend of the directory.
        directory: Absolute path of the store's directory. It may be missing.
        fresh: Whether the caller starts over.
    """
    stores: tuple[StoreSight, ...] = ()
    error = ""
    try:
        if backend.stat(directory) is not None:
            stores = _stores(backend, directory)
    except (OffloadError, OSError) as failure:
        error = reason_of(failure)
    return Sight(
        host=socket.gethostname(),
        new_id=uuid.uuid4().hex,
        fresh=fresh,
        stores=stores,
        error=error,
    )


def place_of(directory: str) -> str:
    """Return a text that is the same for two processes if they see the same directory.

    It names the running system of the host. So two hosts that share a file system count as two
    places.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    found = os.stat(directory)
    host = boot.read_text().strip() if boot.exists() else socket.gethostname()
    return f"{host}:{found.st_dev}:{found.st_ino}"


def _stores(backend: Backend, directory: str) -> tuple[StoreSight, ...]:
    checkpoints: list[CheckpointSight] = []
    ids: list[str] = []
    for path in checkpoint_paths(backend, directory):
        try:
            manifest = decode_manifest(backend, path)
            check_name(path, manifest)
        except CheckpointError as error:
            step = step_of(os.path.basename(path)) or 0
            checkpoints.append(CheckpointSight(step=step, generation=0, problem=str(error)))
            continue
        ids.append(manifest.store_id)
        parts = tuple((one.owner, one.name, one.digest) for one in manifest.owners)
        checkpoints.append(
            CheckpointSight(step=manifest.step, generation=manifest.generation, parts=parts)
        )
    owners: list[OwnerSight] = []
    for owner, path in owner_directories(backend, directory).items():
        found = parts_of_owner(backend, path)
        ids += [part.header.store_id for part in found if part.header is not None]
        sealed = tuple(
            PartSight(name=part.name, digest=part.header.digest, problem=part.reason)
            for part in found
            if part.header is not None
        )
        owners.append(OwnerSight(owner=owner, place=place_of(path), parts=sealed))
    recorded = read_store_id(backend, directory, durable=False)
    if not ids and recorded is None and not checkpoints:
        return ()
    store_id = ids[0] if ids else recorded or ""
    return (
        StoreSight(
            store_id=store_id,
            place=place_of(directory),
            checkpoints=tuple(checkpoints),
            owners=tuple(owners),
        ),
    )
