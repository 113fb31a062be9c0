"""Chunks of a slot that is being filled from elsewhere: which have arrived, and a wait for each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from gds.waiting import Monitor


class Arrivals:
    """Record of the chunks that a slot is still waiting for; any thread may use it.

    A chunk has arrived when all of its pieces have been compared with their digests and written.

    Args:
        pieces: Chunk of each piece that is still to come. A chunk that is not named is there.
    """

    def __init__(self, pieces: Iterable[int]) -> None:
        self._changed = Monitor()
        self._missing = Counter(pieces)
        self._error: Exception | None = None

    def has(self, chunk: int) -> bool:
        """Return whether all of a chunk has arrived."""
        return not self._missing[chunk]

    def wait(self, chunk: int) -> None:
        """Wait until all of a chunk has arrived.

        Raises:
            Exception: The error of `fail`, if the chunk will not arrive.
        """
        self._changed.wait_until(lambda: self.has(chunk) or self._error is not None)
        if self._error is not None and not self.has(chunk):
            raise self._error

    def add(self, chunk: int) -> None:
        """Record that a piece of a chunk has arrived."""
        with self._changed:
            self._missing[chunk] -= 1
            if not self._missing[chunk]:
                self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Record that what is missing will not arrive; every wait for it raises the error."""
        with self._changed:
            self._error = error
            self._changed.notify_all()
