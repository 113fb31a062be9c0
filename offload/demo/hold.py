"""Stop of the training process in the middle of a step, for the demo to kill it at that point.

A kill from outside may come too late for a short update, because nothing guarantees when another
process gets a processor. So the training process stops itself, and waits to be killed.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Hold:
    """Stops this process in the middle of an update, at whatever point the update has reached.

    If an update ends before the timer fires, the next update is stopped instead.

    Args:
        step: First step whose update is to be stopped; None to stop no update.
        say: Function that is called as ``say("held", step=...)`` just before the process stops.
    """

    def __init__(self, step: int | None, say: Callable[..., None]) -> None:
        self._step = math.inf if step is None else step
        self._say = say
        self._fastest_s = math.inf
        self._within: int | None = None
        """The step whose update is in progress and is to be stopped; None at all other times."""
        if step is not None:
            signal.signal(signal.SIGALRM, self._stand_still)

    def is_due(self, step: int) -> bool:
        """Return whether the update of a step is to be stopped."""
        return step >= self._step

    @contextmanager
    def amid(self, step: int) -> Iterator[None]:
        """Run the block as the update of a step. If the step is due, the process stops in it."""
        began = time.perf_counter()
        if self.is_due(step):
            self._within = step
            # This is early enough even for an update that is much faster than all before.
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
