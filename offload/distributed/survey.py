"""What this rank sees in the directories of a store, before any rank has opened it."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gds import Backend
from offload.checkpoint.owner_parts import PartFound, owner_directories, parts_of_owner
from offload.checkpoint.reading import check_name, checkpoint_paths, decode_manifest
from offload.distributed import node
from offload.distributed.agreement.sights import (
    CheckpointSight,
    DirectorySight,
    OwnerSight,
    PartSight,
    Sight,
    StoreSight,
)
from offload.errors import CheckpointError, OffloadError, reason_of
from offload.format.names import owner_name, step_of
from offload.store.store_id import read_store_id


@dataclass(slots=True)
class _Content:
    """What a directory has of stores."""

    directory: str
    store_id: str | None = None
    """Identity of the store whose first directory this is; None if it is none."""

    checkpoints: list[CheckpointSight] = field(default_factory=list)
    owners: dict[int, list[PartFound]] = field(default_factory=dict)
    """Parts in the directory of each owner, by the owner's number."""


def survey(backend: Backend, directories: Sequence[str], *, fresh: bool) -> Sight:
    """Return what this rank sees; an error that it meets is part of the result.

    Nothing is changed, and nothing is locked: another process may be writing the store.

    Args:
        backend: Backend of the directories.
        directories: Absolute paths of the directories that this rank was given. They may be
            missing.
        fresh: Whether the caller starts over.
    """
    this = node.this_node()
    stores: tuple[StoreSight, ...] = ()
    given: list[DirectorySight] = []
    error = ""
    try:
        given = [DirectorySight(path=one, place=node.place_of(backend, one)) for one in directories]
        present = [one for one in directories if backend.stat(one) is not None]
        stores = _stores(backend, [_content(backend, one) for one in dict.fromkeys(present)])
    except (OffloadError, OSError) as failure:
        error = reason_of(failure)
    return Sight(
        host=this.host,
        new_id=uuid.uuid4().hex,
        node=this.token,
        directories=tuple(given),
        fresh=fresh,
        stores=stores,
        error=error,
    )


def _content(backend: Backend, directory: str) -> _Content:
    content = _Content(directory)
    ids: list[str] = []
    for path in checkpoint_paths(backend, directory):
        try:
            manifest = decode_manifest(backend, path)
            check_name(path, manifest)
        except CheckpointError as error:
            step = step_of(os.path.basename(path)) or 0
            content.checkpoints.append(CheckpointSight(step=step, generation=0, problem=str(error)))
            continue
        ids.append(manifest.store_id)
        parts = tuple((one.owner, one.name, one.digest) for one in manifest.owners)
        content.checkpoints.append(
            CheckpointSight(step=manifest.step, generation=manifest.generation, parts=parts)
        )
    recorded = read_store_id(backend, directory, durable=False)
    if ids or recorded is not None or content.checkpoints:
        content.store_id = ids[0] if ids else recorded or ""
    for owner, path in owner_directories(backend, directory).items():
        content.owners[owner] = parts_of_owner(backend, path)
    return content


def _stores(backend: Backend, found: Sequence[_Content]) -> tuple[StoreSight, ...]:
    """Return the stores of which something is in some directories."""
    firsts = [one for one in found if one.store_id is not None]
    known = list(dict.fromkeys(one.store_id for one in firsts if one.store_id))
    others = [
        part.header.store_id
        for one in found
        if one.store_id is None  # what other stores left in a first directory is not opened
        for parts in one.owners.values()
        for part in parts
        if part.header is not None
    ]
    stores: list[StoreSight] = []
    for store_id in dict.fromkeys([*known, *others]) or ([""] if firsts else []):
        of_store = [one for one in firsts if one.store_id == store_id]
        owners = tuple(_owners(backend, found, store_id))
        # Several directories that are the first one are copies, which nobody can choose between.
        stores += [
            StoreSight(
                store_id=store_id,
                place=node.place_of(backend, one.directory),
                directory=one.directory,
                checkpoints=tuple(one.checkpoints),
                owners=owners,
            )
            for one in of_store
        ] or [StoreSight(store_id=store_id, owners=owners)]
    return tuple(stores)


def _owners(backend: Backend, found: Sequence[_Content], store_id: str) -> Iterable[OwnerSight]:
    """Return the owners of a store; one that is in several directories occurs several times.

    A directory of an owner without a sealed part of the store counts only if there is no other: a
    run that ended before its first checkpoint may have left it.
    """
    for owner in sorted({owner for one in found for owner in one.owners}):
        places = [one for one in found if owner in one.owners]
        sealed = [one for one in places if _parts(one.owners[owner], store_id)]
        for one in sealed or places[:1]:
            yield OwnerSight(
                owner=owner,
                place=node.place_of(backend, f"{one.directory}/{owner_name(owner)}"),
                directory=one.directory,
                parts=_parts(one.owners[owner], store_id),
            )


def _parts(found: Sequence[PartFound], store_id: str) -> tuple[PartSight, ...]:
    return tuple(
        PartSight(name=part.name, digest=part.header.digest, problem=part.reason)
        for part in found
        if part.header is not None and part.header.store_id == store_id
    )
