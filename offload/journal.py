"""Log lines about what a store does, on the logger ``offload``, and a line for the terminal.

A handler of a log may wait, for its own lock or for a slow terminal, and it may raise. Therefore
events that happen while locks are held are only noted, and `Journal.tell` logs them later.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections import deque
from contextlib import suppress

_log = logging.getLogger("offload")

VERBOSITY = "OFFLOAD_VERBOSITY"
"""Variable of the environment that makes `say` silent, as ``TRANSFORMERS_VERBOSITY`` does there:
``warning``, ``error`` or ``critical``."""


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


def say(line: str) -> None:
    """Write a line on standard error, for the person who has started the program.

    Nothing is written if that person has asked for silence, by `VERBOSITY` or by the level of the
    logger ``offload``; nor if the log shows level INFO, since it has a line of `log_event` then. An
    error in writing is ignored.
    """
    if os.environ.get(VERBOSITY, "").lower() in ("warning", "error", "critical"):
        return
    is_silenced = max(_log.level, _log.manager.disable + 1) > logging.INFO
    is_logged = _log.isEnabledFor(logging.INFO) and _log.hasHandlers()
    if is_silenced or is_logged or sys.stderr is None:
        return
    with suppress(OSError, ValueError):  # a closed standard error
        sys.stderr.write(f"offload: {line}\n")
        sys.stderr.flush()


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
