"""Ranks that were waited for in vain, so that no later wait begins its limit anew for them."""

from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Quiet:
    """Silence of a rank, as a wait that ended without it has seen it."""

    scope: str
    """Name of the exchange or seal in which the rank was awaited."""

    sign: str | None
    """Its newest sign of progress there; None if it had given none."""

    quiet_s: float
    """Seconds without another sign until the wait ended."""


class QuietRanks:
    """What the waits of this rank have seen of ranks that did not come. Any thread.

    A seal waits several times, and the next call waits again. A rank that has ended is silent in
    all of them; together they wait for one limit only.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[int, Quiet] = {}

    def note(self, rank: int, quiet: Quiet) -> None:
        """Record that a wait has ended without a rank."""
        with self._lock:
            self._found[rank] = quiet

    def of(self, rank: int) -> Quiet | None:
        """Return the silence of a rank; None if it has come since, or was never missed."""
        with self._lock:
            return self._found.get(rank)

    def forget(self, rank: int) -> None:
        """Record that a message or sign of a rank has come."""
        with self._lock:
            self._found.pop(rank, None)
