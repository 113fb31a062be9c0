"""Letting go of the engine of an optimizer that nobody has closed.

Garbage is collected on whatever thread allocates, in the middle of anything. There, an engine may
not be able to wait for its own threads, or to start another one.
"""

from __future__ import annotations

import atexit
import logging
import threading
from contextlib import suppress

from offload.ambient import in_neutral
from offload.engine.chunk_pass import STEP_THREAD
from offload.engine.engine import Engine
from offload.engine.seal import SEAL_THREAD
from offload.errors import OffloadError
from offload.update.pool import UPDATE_THREAD

_OWN_THREADS = (SEAL_THREAD, STEP_THREAD, UPDATE_THREAD, "gds-")

_left_open: list[Engine] = []
"""Engines of optimizers that were collected where nothing can be waited for."""


@in_neutral
def close_quietly(engine: Engine) -> None:
    """Close an engine, on this thread or another, now or later; errors are logged only."""
    if _is_starting_thread():
        _left_open.append(engine)
        return
    if threading.current_thread().name.startswith(_OWN_THREADS):
        with suppress(RuntimeError):  # at exit no thread can be started, and none is waited for
            threading.Thread(target=close_quietly, args=(engine,), name="offload-close").start()
        return
    try:
        engine.close()
    except (OffloadError, OSError) as error:
        # Nobody is left who could catch it. What has been sealed before is sealed.
        logging.getLogger("offload").error("%s: %s", engine.store.directory, error)


@atexit.register
def close_left_open() -> None:
    """Close what was put off: when the next optimizer is made, and at exit."""
    while _left_open:
        close_quietly(_left_open.pop())


def _is_starting_thread() -> bool:
    # A thread that is just being started holds locks that joining or starting another one needs.
    # Asked of the module's own table, since its functions take those locks.
    return threading.get_ident() not in getattr(threading, "_active", {threading.get_ident()})
