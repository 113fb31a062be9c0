"""Effects: the steps of a protocol as values, and the key-value store over which they happen.

A *program* is a generator. It yields one effect, is sent the effect's result, and returns the
program's result. `driver` runs programs over a channel. The tests run the same programs in a model
checker, which tries every order of the effects of all ranks, and lets ranks die, stop and lose
power between any two of them. So a program has no other means to act: it reads no clock, opens no
file and keeps nothing that is not in its own variables.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeVar

from offload.errors import RanksError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Put:
    """Set the value of a key. The result is None."""

    key: str
    value: str


@dataclass(frozen=True, slots=True)
class Get:
    """Read a key. The result is its value, or None."""

    key: str


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove keys that every rank has read. The result is None."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Await:
    """Wait until each of some ranks has put its key. The result is an `Arrived`.

    The wait ends early if one of the ranks that are awaited gives no sign of progress for the
    agreed limit, has left, or has announced an error. Silence that an earlier wait has seen counts.
    """

    wanted: tuple[tuple[int, str], ...]
    """Ranks that are awaited, each with the key that it puts."""

    scope: str
    """Name of the exchange or seal. A sign of progress counts only if it was given for it."""

    heeds_errors: bool = True
    """Whether any announced error of an awaited rank ends the wait, or only a final one."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """Values that have arrived by the end of an `Await`."""

    values: Mapping[int, str]
    """Value of each rank that has put its key; ranks that gave no sign are missing."""

    error: str = ""
    """Error that a rank has announced, in words, if the wait ended because of it."""

    lost: frozenset[int] = frozenset()
    """Ranks that gave no sign of progress for the limit, or have left, if the wait ended because of
    them. Others may be missing as well, which were only not waited for any longer."""

    left: Mapping[int, str] = field(default_factory=dict)
    """Those of the lost ranks that have said that they leave, each with the reason, which is empty
    if the rank has closed its optimizer."""


@dataclass(frozen=True, slots=True)
class Act:
    """Call something on this rank. The result is what it returns; what it raises is raised."""

    call: Callable[..., Any]
    args: tuple[Any, ...] = ()


Effect: TypeAlias = Put | Get | Delete | Await | Act

Program: TypeAlias = Generator[Effect, Any, T]
"""A protocol of one rank, which yields effects and returns a value of type `T`."""


class ChannelLostError(RanksError):
    """The key-value store does not answer; probably the process that serves it has ended."""


class Channel(Protocol):
    """One connection to the key-value store of all ranks.

    A key is a short text, and so is a value. Every rank sees a value soon after `put` has returned.
    Each method raises `ChannelLostError` if the store does not answer. After that
    error of `put` it is not known whether the other ranks see the value.

    Only one thread may use a channel at a time; a further thread uses a `clone`.
    """

    def put(self, key: str, value: str, *, within_s: float | None = None) -> None:
        """Set the value of a key, whether or not it has one.

        A store that does not answer within ``within_s`` seconds is given up; None for the limit of
        the channel.
        """
        ...

    def get(self, key: str) -> str | None:
        """Return the value of a key; None if it has none. Never waits for another rank."""
        ...

    def wait(self, key: str, timeout_s: float) -> str | None:
        """Wait until a key has a value, and return it; None after about `timeout_s` seconds."""
        ...

    def delete(self, key: str) -> None:
        """Remove a key, if it is there."""
        ...

    def now(self) -> float:
        """Return the time in seconds by a clock that never goes back."""
        ...

    def clone(self) -> Channel:
        """Return another connection to the same store, for another thread."""
        ...

    def close(self) -> None:
        """Release the connection. Never waits; later calls raise `ChannelLostError`."""
        ...
