"""The ranks of one training, as the engine of one rank sees them.

With one process there is nobody to agree with: `Alone`. `offload.distributed` has the other
implementation. The engine does not know how ranks talk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias, TypeVar

from gds import Backend
from offload.options import Options
from offload.retention.policy import Retention
from offload.store.state_store import StateStore
from offload.store.store import Store

T = TypeVar("T")

Drive: TypeAlias = tuple[Backend, str]
"""Backend and path of a directory of the store."""


class Ranks(Protocol):
    """Ranks that train one model into one store. Every rank makes the same calls of the engine."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def open_store(
        self, drives: Sequence[Drive], keep: Retention, options: Options, *, fresh: bool
    ) -> StateStore:
        """Open the store for writing. Collective.

        Args:
            drives: Backend and path of each directory.
            keep: Retention policy.
            options: Settings, of which those of the store are used.
            fresh: Whether to start over although the store has checkpoints.

        Raises the errors of `offload.store.store.Store`.
        """
        ...

    def together(self, what: str, action: Callable[[], T]) -> T:
        """Do something on every rank, and return when it has succeeded on all of them. Collective.

        Args:
            what: Call of the user, for messages: ``restore()``.
            action: What this rank does. It makes no collective call.

        Raises:
            OffloadError: The action failed on a rank. That rank raises the error of the action, and
                the others an error that names the rank and the cause; of the same class, if the
                class is one of this package.
        """
        ...

    def all(self, what: str, value: bool) -> bool:
        """Return whether a value is true on all ranks. Collective.

        Args:
            what: Call of the user, for messages.
            value: Value of this rank.
        """
        ...

    def failed(self, error: BaseException) -> None:
        """Tell the other ranks that a step has failed here. Never waits, never raises."""
        ...

    def close(self) -> None:
        """Leave the ranks. No exchange, no wait: other ranks may have ended already."""
        ...


class Alone:
    """One process, which is all ranks."""

    rank = 0
    size = 1

    def open_store(
        self, drives: Sequence[Drive], keep: Retention, options: Options, *, fresh: bool
    ) -> StateStore:
        """Open the store of this process."""
        (backend, directory), *others = drives
        return Store(
            backend,
            directory,
            others,
            keep=keep,
            fresh=fresh,
            train_state_bytes=options.train_state_bytes,
            reader_timeout_s=options.reader_timeout_s,
            allow_volatile=options.allow_volatile,
            allow_remote=options.allow_remote,
        )

    def together(self, what: str, action: Callable[[], T]) -> T:
        """Return what the action returns."""
        del what
        return action()

    def all(self, what: str, value: bool) -> bool:
        """Return the value."""
        del what
        return value

    def failed(self, error: BaseException) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
