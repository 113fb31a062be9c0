"""How a rank opens its share of a store: with all ranks, or not at all."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from gds import Backend
from offload.checkpoint.owner_parts import PartFound, owner_directories, parts_of_owner
from offload.checkpoint.reading import check_name, checkpoint_paths, decode_manifest
from offload.distributed import node
from offload.distributed.agreement.agreement import Agreement
from offload.distributed.agreement.opening import Plan
from offload.distributed.agreement.peers import Json
from offload.distributed.agreement.sights import (
    CheckpointSight,
    DirectorySight,
    OwnerSight,
    PartSight,
    Sight,
    StoreSight,
)
from offload.errors import CheckpointError, OffloadError, RanksError, reason_of
from offload.format.names import owner_name, step_of
from offload.options import Options
from offload.retention.policy import Retention
from offload.store.directories import check_further_directories, spread_directories
from offload.store.owner_store import OwnerStore
from offload.store.shared import SharedStore
from offload.store.store import Store
from offload.store.store_id import read_store_id


@dataclass(slots=True)
class Opened:
    """What this rank has opened of a store, and where it is."""

    agreement: Agreement
    backend: Backend
    plan: Plan
    given: tuple[str, ...]
    directory: str
    store: Store | None = None
    """The store, on the writer."""

    part: OwnerStore | None = None
    """The parts of an owner, on every other rank."""

    @property
    def home(self) -> str:
        """Directory of the store that has the parts of this rank's owner."""
        return self.plan.directories[self.agreement.peers.rank]

    @property
    def owner(self) -> int:
        """Owner of state that this rank serves."""
        return self.plan.homes[self.agreement.peers.rank]

    @property
    def owners(self) -> dict[int, str]:
        """The store's directory on the node of each owner that the writer does not serve."""
        return directories_of_owners(self.plan)

    @property
    def is_near(self) -> bool:
        """Whether this rank sees the first directory."""
        return self.plan.near[self.agreement.peers.rank]

    @property
    def further(self) -> tuple[str, ...]:
        """The directories besides the first that this rank was given."""
        return tuple(one for one in self.given if not self.is_near or one != self.directory)

    @property
    def directories(self) -> tuple[str, ...]:
        """The first directory of the store, and the others that this rank was given."""
        return (self.directory, *self.further)

    @property
    def writer(self) -> Store:
        """The store, on the writer."""
        if self.store is None:
            raise RuntimeError("only the writer has the store")
        return self.store

    @property
    def place(self) -> str:
        """A text that is the same for all ranks that see the same first directory."""
        try:
            return node.place_of(self.backend, self.directory)
        except OSError:
            return ""

    @property
    def poisoned(self) -> bool:
        """Whether a rename or sync has failed on this rank."""
        store, part = self.store, self.part
        return (store is not None and store.poisoned) or (part is not None and part.poisoned)

    def open_part(self, offer: Json, options: Options) -> None:
        """Open the parts of this rank's owner, unless it is the writer's."""
        if self.is_near and self.place != offer["place"]:
            raise RanksError(
                f"directory={self.directory!r} is not the directory of "
                f"{self.agreement.peers.name(0)}, which is {offer['directory']!r}: give the "
                "same directory on every rank. If "
                "each rank trains a separate model, pass process_group=offload.SEPARATE"
            )
        if self.store is None and self.part is None:
            self.part = OwnerStore(
                self.backend,
                self.home,
                self.owner,
                store_id=offer["store_id"],
                allow_volatile=options.allow_volatile,
                allow_remote=options.allow_remote,
            )

    def close(self) -> None:
        """Close all files and release the locks. Idempotent."""
        if self.store is not None:
            self.store.close()
        if self.part is not None:
            self.part.close()


def open_first(
    agreement: Agreement,
    backend: Backend,
    directories: Sequence[str],
    keep: Retention,
    options: Options,
    *,
    fresh: bool,
    settle: Callable[[Plan], None],
) -> Opened:
    """Agree with all ranks on how the store is opened; the writer opens it. Collective.

    The other ranks open their parts when the writer has said which store it is: see
    `Opened.open_part`. If this raises, nothing is open.
    """
    sight = survey(backend, directories, fresh=fresh)
    rank = agreement.peers.rank
    done: list[Opened] = []

    def enter(plan: Plan) -> None:
        """Open the first directory on the writer; find it on the others."""
        settle(plan)
        firsts = [store.directory for store in sight.stores if store.place] or [directories[0]]
        first = firsts[0] if plan.near[rank] else plan.directories[plan.writer]
        opened = Opened(agreement, backend, plan, tuple(directories), first)
        spread: list[str] = []
        if plan.near[rank]:
            spread = spread_directories(backend, first, opened.further, plan.store_id)
        check_further_directories(backend, opened.further, spread)
        if rank == plan.writer:
            opened.store = Store(
                backend,
                first,
                [(backend, directory) for directory in spread],
                keep=keep,
                fresh=fresh,
                train_state_bytes=options.train_state_bytes,
                reader_timeout_s=options.reader_timeout_s,
                allow_volatile=options.allow_volatile,
                allow_remote=options.allow_remote,
                shared=shared_store(plan, opened.further),
            )
        done.append(opened)

    try:
        agreement.open(sight, enter)
    except BaseException:
        for opened in done:
            opened.close()
        raise
    return done[0]


def directories_of_owners(plan: Plan) -> dict[int, str]:
    """Return the store's directory on the node of each owner that is not the writer's."""
    pairs = enumerate(zip(plan.homes, plan.directories, strict=True))
    return {owner: directory for rank, (owner, directory) in pairs if rank != plan.writer}


def shared_store(plan: Plan, others: Sequence[str]) -> SharedStore:
    """Return what the writer knows of the owners that other ranks serve."""
    seen: dict[int, dict[str, str]] = {}
    for owner, name, digest in plan.parts:
        seen.setdefault(owner, {})[name] = digest
    elsewhere = frozenset(
        owner for owner, near in zip(plan.homes, plan.near, strict=True) if not near
    )
    return SharedStore(directories_of_owners(plan), seen, tuple(others), elsewhere)


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
