"""The part of a store that each rank serves, for work beside training that all ranks share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class Mailbox(Protocol):
    """Short texts under keys, which all ranks see. Only one thread may use a mailbox at a time.

    Every method raises an `OffloadError` if the texts cannot be reached any more.
    """

    def put(self, key: str, value: str) -> None:
        """Set the value of a key, whether or not it has one."""
        ...

    def get(self, key: str) -> str | None:
        """Return the value of a key; None if it has none. Never waits for another rank."""
        ...

    def delete(self, key: str) -> None:
        """Remove a key, if it is there."""
        ...

    def close(self) -> None:
        """Release the connection. Never waits."""
        ...


@dataclass(frozen=True, slots=True)
class Serving:
    """The part of the state that each rank serves, as one of the ranks sees it."""

    rank: int
    """This rank, from 0."""

    writer: int
    """Rank that has the first directory of the store, and decides for all."""

    owners: tuple[int, ...]
    """Number of the owner that each rank serves, by rank; 0 for the writer."""

    directory: str
    """Directory of the store that has the parts of this rank's owner."""

    connect: Callable[[], Mailbox]
    """Function that returns a mailbox of all ranks. It may take some seconds."""

    sees_all: bool = True
    """Whether all ranks are on the host of the first directory, so that each sees all parts."""

    @property
    def is_writer(self) -> bool:
        """Whether this rank decides for all."""
        return self.rank == self.writer

    @property
    def owner(self) -> int:
        """Owner that this rank serves."""
        return self.owners[self.rank]
