"""Closing of the engines of optimizers that are garbage-collected before the user closes them.

Garbage collection runs on any thread that allocates, in the middle of any operation. On that
thread, an engine may be unable to wait for its own threads, or to start another thread.
"""

from __future__ import annotations

import atexit
import logging
import threading
from contextlib import suppress

from offload.ambient import in_neutral
from offload.engine.engine import Engine
from offload.errors import OffloadError

_OWN_THREADS = ("offload", "gds-")
"""Beginnings of the names of threads of this library, which `Engine.close` may wait for."""

_CLOSING_THREAD = "offload-close"

_left_open: list[Engine] = []
"""Engines of optimizers that were collected on a thread that cannot wait for others."""


@in_neutral
def close_quietly(engine: Engine) -> None:
    """Close an engine, on this thread or another, now or later; errors are only logged."""
    if _is_starting_thread():
        _left_open.append(engine)
        return
    name = threading.current_thread().name
    if name.startswith(_OWN_THREADS) and name != _CLOSING_THREAD:
        with suppress(RuntimeError):  # at exit, no thread can be started or waited for
            threading.Thread(target=close_quietly, args=(engine,), name=_CLOSING_THREAD).start()
        return
    try:
        engine.close()
    except (OffloadError, OSError) as error:
        # No caller is left to catch the error. Checkpoints that were sealed before stay sealed.
        logging.getLogger("offload").error("%s: %s", engine.store.directory, error)


@atexit.register
def close_left_open() -> None:
    """Close the engines in `_left_open`; called when the next optimizer is made, and at exit."""
    while _left_open:
        close_quietly(_left_open.pop())


def _is_starting_thread() -> bool:
    """Return whether this thread has not finished starting."""
    # A thread that is being started holds locks that joining or starting another thread needs.
    # The functions of `threading` take those locks, so its own table is read instead.
    return threading.get_ident() not in getattr(threading, "_active", {threading.get_ident()})
