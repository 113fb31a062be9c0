"""Queues of work that happens as late as whoever waits for it allows."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Hashable

GARBAGE = 0xA5
"""Value of all bytes of memory that nobody has written."""


class Streams:
    """Streams of a device; each does its work in order. Thread-safe.

    Args:
        late: Whether work waits until somebody waits for it; otherwise `settle` does it.
    """

    def __init__(self, *, late: bool = True) -> None:
        self.late = late
        self.lock = threading.RLock()
        """Held while work is done."""
        self._queues: dict[Hashable, list[Callable[[], object]]] = defaultdict(list)
        self._done: dict[Hashable, int] = defaultdict(int)

    def launch(self, stream: Hashable, work: Callable[[], object]) -> None:
        """Queue work."""
        with self.lock:
            self._queues[stream].append(work)

    def position(self, stream: Hashable) -> int:
        """Return the number of pieces of work that have been queued on a stream so far."""
        with self.lock:
            return len(self._queues[stream])

    def settle(self, stream: Hashable) -> None:
        """Do all work of a stream, unless it is to be late."""
        if not self.late:
            self.run(stream)

    def run(self, stream: Hashable, position: int | None = None) -> None:
        """Do the work of a stream up to a position; by default all of it."""
        with self.lock:
            queue = self._queues[stream]
            stop = len(queue) if position is None else position
            while self._done[stream] < stop:
                number = self._done[stream]
                self._done[stream] += 1
                work, queue[number] = queue[number], _nothing
                work()

    def clear(self) -> None:
        """Forget the work that nobody waited for, and the memory that it refers to."""
        with self.lock:
            self._queues.clear()


def _nothing() -> None:
    """Do the work that has been done already."""
