"""Measurements that decisions about uploads go by: the link, the checkpoints, and the steps."""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable

_WEIGHT = 0.3
"""Weight of the newest time between checkpoints in its running average."""

_RATES = 3
"""Number of uploads whose rates count. Of three, the median has followed the link after two, and is
not changed by one upload that was held up."""

_STEPS = 64
"""Number of steps of each kind that are compared."""

_LEAST_STEPS = 8
"""Least number of steps of each kind without which nothing is compared."""


class Measurements:
    """Measured rates and times; all methods may be called from any thread.

    Args:
        clock: Clock in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._rates: deque[float] = deque(maxlen=_RATES)
        self._interval_s: float | None = None
        self._last_sealed_s: float | None = None
        self._last_step_s: float | None = None
        self._uploading = False
        self._began_s = 0.0
        self._was_uploading = False
        self._beside: deque[float] = deque(maxlen=_STEPS)
        self._alone: deque[float] = deque(maxlen=_STEPS)

    def sealed(self) -> float:
        """Record that a checkpoint was sealed now; return the time."""
        with self._lock:
            now = self._clock()
            if self._last_sealed_s is not None:
                self._interval_s = _average(self._interval_s, now - self._last_sealed_s)
            self._last_sealed_s = now
            return now

    def restored(self) -> float:
        """Return the time now, at which training goes on from a checkpoint."""
        with self._lock:
            return self._clock()

    def sent(self, nbytes: int, seconds: float) -> None:
        """Record how long some bytes took, from the drive to the checked copy."""
        if nbytes and seconds > 0:
            with self._lock:
                self._rates.append(nbytes / seconds)

    def uploading(self, running: bool) -> None:
        """Record that an upload begins or ends now."""
        with self._lock:
            if running:
                self._began_s = self._clock()
            self._uploading = running
            self._was_uploading = True  # the present step is of neither kind

    def step_taken(self) -> None:
        """Record that a step has ended now."""
        with self._lock:
            now = self._clock()
            if self._last_step_s is not None and not self._was_uploading:
                kind = self._beside if self._uploading else self._alone
                kind.append(now - self._last_step_s)
            self._last_step_s = now
            self._was_uploading = False

    @property
    def bytes_per_s(self) -> float | None:
        """Rate of the link: the median of the last uploads; None if it is not known."""
        with self._lock:
            return statistics.median_low(self._rates) if self._rates else None

    def most_bytes_per_s(self, nbytes: int) -> float | None:
        """Return the rate of the upload that runs, if it has sent `nbytes`; None if none runs."""
        with self._lock:
            seconds = self._clock() - self._began_s
            return nbytes / seconds if self._uploading and seconds > 0 else None

    @property
    def interval_s(self) -> float | None:
        """Seconds between checkpoints; None if it is not known."""
        with self._lock:
            return self._interval_s

    @property
    def slowdown(self) -> float | None:
        """Share by which steps beside uploads take longer than others; None if it is not known.

        Medians are compared, of steps that alternate with uploads as these come and go.
        """
        with self._lock:
            if min(len(self._beside), len(self._alone)) < _LEAST_STEPS:
                return None
            alone_s = statistics.median(self._alone)
            beside_s = statistics.median(self._beside)
            return max(0.0, beside_s / alone_s - 1) if alone_s > 0 else None

    @property
    def busy_share(self) -> float:
        """Share of the time of recent steps during which uploads were running."""
        with self._lock:
            beside_s, alone_s = sum(self._beside), sum(self._alone)
            total_s = beside_s + alone_s
            return beside_s / total_s if total_s else float(self._uploading)


def _average(old: float | None, new: float) -> float:
    return new if old is None else (1 - _WEIGHT) * old + _WEIGHT * new
