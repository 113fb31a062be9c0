"""Waiting for what other threads, or the collector of cycles, are about to do.

A test must not fail because a thread was not given the processor for a while, and not pass because
one was. So what is waited for is a condition, and the time is bounded only so that a failure ends.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable

from tests.limits import HANG_S

TIMEOUT_S = HANG_S
"""Only reached where something that should happen does not."""

_POLL_S = 0.005


def eventually(reached: Callable[[], object]) -> bool:
    """Wait until something holds; returns whether it does."""
    until = time.monotonic() + TIMEOUT_S
    while not reached():
        if time.monotonic() > until:
            return False
        time.sleep(_POLL_S)
    return True


def is_freed(reference: weakref.ref[object]) -> bool:
    """Return whether an object goes when cycles are collected.

    One `gc.collect` is not enough: it does nothing while another thread collects.
    """

    def gone() -> bool:
        gc.collect()
        return reference() is None

    return eventually(gone)
