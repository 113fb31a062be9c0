"""Retention and pins of a store of several ranks: the writer decides, and all ranks wait for it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from gds import Backend
from offload.distributed.agreement.agreement import Agreement
from offload.errors import RanksError
from offload.retention.pins import FoundPins, read_pins
from offload.store.expiry import Leaving
from offload.store.opening import StoredCheckpoint
from offload.store.store import Store


class RankKeeping:
    """Retention policy and pins, as one rank uses them; see `offload.store.expiry.Keeping`.

    Args:
        agreement: Agreement of all ranks.
        backend: Backend of the first directory.
        directory: The store's first directory.
        checkpoints: Function that returns the usable checkpoints, as this rank knows them.
        store: The store, on the writer; None on the other ranks.
        is_near: Whether this rank sees the first directory.
    """

    def __init__(
        self,
        agreement: Agreement,
        backend: Backend,
        directory: str,
        checkpoints: Callable[[], list[StoredCheckpoint]],
        store: Store | None,
        *,
        is_near: bool,
    ) -> None:
        self._agreement = agreement
        self._backend = backend
        self._directory = directory
        self._checkpoints = checkpoints
        self._is_near = is_near
        self._keeping = None if store is None else store.keeping
        self._idle = Leaving()

    @property
    def current(self) -> list[StoredCheckpoint]:
        """Usable checkpoints that no fresh start has given up."""
        return [c for c in self._checkpoints() if not c.superseded]

    @property
    def leaving(self) -> Leaving:
        """Checkpoints that are being copied to a tier, as the writer's store knows them."""
        return self._idle if self._keeping is None else self._keeping.leaving

    def pins(self) -> FoundPins:
        """Read the pins from the drive.

        Raises:
            RanksError: This rank does not see the first directory.
        """
        if not self._is_near:
            raise RanksError(
                f"the pins are in {self._directory}, on another host: ask on a rank of that host"
            )
        return read_pins(self._backend, self._directory)

    def num_slots(self) -> int:
        """Return the number of slots that retention is sure to need; 0 if the writer knows it."""
        return 0 if self._keeping is None else self._keeping.num_slots()

    def warn(self, refused: Sequence[str]) -> None:
        """Warn, on the writer, about pins of checkpoints that do not exist."""
        if self._keeping is not None:
            self._keeping.warn(refused)

    def warn_unranked(self, step: int, metrics: Collection[str]) -> None:
        """Warn, on the writer, if a checkpoint lacks a metric that the policy ranks by."""
        if self._keeping is not None:
            self._keeping.warn_unranked(step, metrics)

    def pin(self, name: str, which: int | str | None = None) -> None:
        """Pin a checkpoint, durably. Collective."""
        keeping = self._keeping
        self._by_writer("pin()", lambda: keeping.pin(name, which) if keeping else None)

    def unpin(self, name: str) -> None:
        """Remove a pin, durably. Collective."""
        keeping = self._keeping
        self._by_writer("unpin()", lambda: keeping.unpin(name) if keeping else None)

    def require_no_newer_pins(self, checkpoint: StoredCheckpoint) -> None:
        """Raise `PinError`, on the writer, if a checkpoint newer than the given one is pinned."""
        if self._keeping is not None:
            self._keeping.require_no_newer_pins(checkpoint)

    def require_replaceable(self, path: str) -> None:
        """Do nothing: the seal looks at the checkpoint that it would replace."""

    def _by_writer(self, what: str, action: Callable[[], None]) -> None:
        self._agreement.together(what, action)
