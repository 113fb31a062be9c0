"""How a rank opens its share of a store: with all ranks, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gds import Backend
from offload.distributed.agreement.agreement import Agreement
from offload.distributed.agreement.messages import Json
from offload.distributed.agreement.opening import Plan
from offload.distributed.node import place_of
from offload.distributed.rank_directories import directories_of_owners, shared_store
from offload.distributed.survey import survey
from offload.errors import RanksError
from offload.options import Options
from offload.retention.policy import Retention
from offload.store.directories import check_further_directories, spread_directories
from offload.store.owners.store import OwnerStore
from offload.store.store import Store


@dataclass(slots=True)
class Opened:
    """What this rank has opened of a store, and where it is."""

    agreement: Agreement
    backend: Backend
    plan: Plan
    """How all ranks have opened the store."""

    given: tuple[str, ...]
    """Directories that this rank was given."""

    directory: str
    """The store's first directory."""

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
        """The store, on the writer.

        Raises:
            RuntimeError: This rank is not the writer.
        """
        if self.store is None:
            raise RuntimeError("only the writer has the store")
        return self.store

    @property
    def place(self) -> str:
        """A text that is the same for all ranks that see the same first directory."""
        try:
            return place_of(self.backend, self.directory)
        except OSError:
            return ""

    @property
    def poisoned(self) -> bool:
        """Whether a rename or sync has failed on this rank."""
        store, part = self.store, self.part
        return (store is not None and store.poisoned) or (part is not None and part.poisoned)

    def open_part(self, offer: Json, options: Options) -> None:
        """Open the parts of this rank's owner, unless it is the writer's.

        Args:
            offer: Identity, directory and place of the store, as the writer tells them.
            options: Settings, of which those of the store are used.

        Raises:
            RanksError: This rank sees another directory than the writer.
        """
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
