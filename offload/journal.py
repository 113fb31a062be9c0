"""Log lines about what a store does, on the logger ``offload``.

A handler of a log may wait, for its own lock or for a slow terminal, and it may raise. Therefore
events that happen while locks are held are only noted, and `Journal.tell` logs them later.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections import deque
from contextlib import suppress

_log = logging.getLogger("offload")


def log_event(message: str, level: int = logging.INFO) -> None:
    """Log one line. An error of a filter or handler is printed, and never raised.

    The caller holds no lock, and no other thread waits for the caller: garbage collection in a
    handler may close another optimizer, and that waits for the threads of that optimizer.
    """
    try:
        _log.log(level, "%s", message)
    except Exception:  # noqa: BLE001  (what has happened stays true if it cannot be logged)
        if logging.raiseExceptions and sys.stderr is not None:
            with suppress(OSError, ValueError):  # a closed standard error is ignored by `logging`
                traceback.print_exc(file=sys.stderr)


class Journal:
    """Events of one store that have not been logged yet. Thread-safe, and never waits."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque()

    def note(self, message: str) -> None:
        """Remember an event until `tell`. The caller may hold locks."""
        self._lines.append(message)

    def tell(self) -> None:
        """Log the events noted so far, the oldest first. The rules are those of `log_event`."""
        while self._lines:
            try:
                line = self._lines.popleft()
            except IndexError:
                return  # another thread has logged it
            log_event(line)
