"""What a tier is to the rest of this wing: named objects that appear whole or not at all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Final, Self, TypeAlias

from gds import Buffer

Data: TypeAlias = bytes | bytearray | memoryview
"""Bytes of an object."""

TIER_NAME: Final = "TIER.json"
"""Name of the object that says that a tier is one."""


class Objects(ABC):
    """Objects below the folder of a tier. Names are relative, with slashes.

    Methods may be called from several threads at once. They raise `TierError` or a subclass of it,
    whose message names the object's URL and never contains credentials. A ``with`` block closes
    what it is given.
    """

    @property
    @abstractmethod
    def url(self) -> str:
        """URL of the tier, for messages."""

    @abstractmethod
    def put(self, name: str, data: Data) -> None:
        """Make an object with the given bytes, in the place of any object of that name.

        The object is durable on return, as far as the service makes anything durable.
        """

    @abstractmethod
    def put_new(self, name: str, data: Data) -> bool:
        """Make an object like `put`, unless one has the name and the service notices that."""

    @abstractmethod
    def put_stream(self, name: str, blocks: Iterator[Data], nbytes: int) -> None:
        """Make an object of any size from blocks in their order, like `put`."""

    @abstractmethod
    def get(self, name: str, most_bytes: int) -> bytes:
        """Return the bytes of a small object.

        Raises:
            TierNotFoundError: No object has the name.
            TierError: The object has more than `most_bytes` bytes.
        """

    @abstractmethod
    def get_range(self, name: str, start: int, nbytes: int, into: Buffer) -> memoryview:
        """Read bytes of an object into memory; return fewer than asked for if it is shorter."""

    @abstractmethod
    def pieces(self, name: str, start: int, nbytes: int) -> Iterator[memoryview]:
        """Yield at least one byte of an object in pieces; fewer than asked for if it is shorter.

        A piece is valid until the next one is asked for.

        Raises:
            TierNotFoundError: No object has the name.
        """

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Return the size of an object in bytes; None if no object has the name."""

    @abstractmethod
    def sizes_below(self, folder: str) -> dict[str, int]:
        """Return the size in bytes of every object in and below a folder, by name."""

    @abstractmethod
    def folders(self, folder: str) -> list[str]:
        """Return the names of the folders in a folder, without its own name, sorted."""

    @abstractmethod
    def delete(self, names: Iterable[str]) -> None:
        """Remove objects. Names without an object are skipped."""

    def drop_unfinished(self, folder: str) -> None:  # noqa: B027  (a service may have nothing)
        """Remove what a writer of this folder that died has left, and that is no object yet."""

    def drive(self) -> str:
        """Return what identifies the file system that has a folder; empty if it is not known."""
        return ""

    def require_place(self, store: str) -> None:  # noqa: B027  (no page of a proxy takes writes)
        """Check that a new tier for copies of a store may be made here.

        Raises:
            TierNotFoundError: Its drive is probably not mounted.
        """

    def close(self) -> None:  # noqa: B027  (the library closes its connections by itself)
        """Release what the object holds. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
