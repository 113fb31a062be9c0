"""Stands still in the middle of a step, for the demo to kill the process there.

Whoever kills a process in the middle of something short from outside may come too late: how soon
another process is given a processor is not known. So it stops itself, and waits to be killed.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Hold:
    """Stops this process in the middle of an update, wherever that has got to by then.

    An update that is over before the moment has come is not held, but the next one.

    Args:
        step: The first whose update is to be held; None for none.
        say: Called as ``say("held", step=...)`` just before the process stands still.
    """

    def __init__(self, step: int | None, say: Callable[..., None]) -> None:
        self._step = math.inf if step is None else step
        self._say = say
        self._fastest_s = math.inf
        self._within: int | None = None
        """The step whose update is under way, if it is to be held."""
        if step is not None:
            signal.signal(signal.SIGALRM, self._stand_still)

    def is_due(self, step: int) -> bool:
        """Return whether the update of a step is to be held."""
        return step >= self._step

    @contextmanager
    def amid(self, step: int) -> Iterator[None]:
        """Run an update; does not return if the process is killed in it."""
        began = time.perf_counter()
        if self.is_due(step):
            self._within = step
            # Early enough also for one that is much faster than all before.
            signal.setitimer(signal.ITIMER_REAL, min(self._fastest_s / 10, 60.0))
        try:
            yield
        finally:
            self._within = None
        self._fastest_s = min(self._fastest_s, time.perf_counter() - began)

    def _stand_still(self, *_: object) -> None:
        if self._within is not None:
            self._say("held", step=self._within)
            os.kill(os.getpid(), signal.SIGSTOP)
