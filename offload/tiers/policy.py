"""The decision whether a sealed checkpoint is uploaded, and the measurements that it goes by.

`decide` reads neither a clock nor a file. So a decision can be computed again from what is logged.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from offload.units import rate

Choice = Literal["upload", "parameters", "keep", "thin", "skip"]
"""What is done with a checkpoint:

- "upload": it is sent now.
- "parameters": its parameters are sent now, and can be used as soon as they are in the tier. The
  state goes behind them, until the parameters of a newer checkpoint are due.
- "keep": it stays on the drive only, because the tier has one that is new enough.
- "thin": it stays on the drive only, because uploads slow training down by more than is allowed, so
  that fewer checkpoints are sent.
- "skip": it stays on the drive only, although the tier could use it: it could not be sent in time.
"""

_MARGIN = 1.25
"""Factor by which an upload may take longer than the measured rate says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """Everything that a decision depends on."""

    nbytes: int
    parameter_bytes: int | None
    """Size in bytes of its parameters; None if they cannot be sent before the state."""

    interval_s: float | None
    """Seconds between checkpoints, as measured; None after the first one."""

    lifetime_s: float | None
    """Seconds after which retention recycles the checkpoint; None if it is not known."""

    bytes_per_s: float | None
    """Rate at which the tier took objects, checks included; None if nothing was sent yet."""

    unmeasured: int
    """Number of checkpoints since the rate was measured."""

    newest_age_s: float | None
    """Seconds since the newest checkpoint in the tier was sealed; None if there is none."""

    parameters_age_s: float | None
    """Seconds since the checkpoint was sealed whose parameters are the newest in the tier; None if
    there are none."""

    slowdown: float | None
    """Share by which steps beside an upload take longer, as measured; None if it is not known."""

    busy_share: float
    """Share of the time during which uploads were running lately."""

    max_slowdown: float
    max_age_s: float | None
    """Age in seconds that the newest checkpoint in the tier should not exceed; None if the tier
    should get as many as it can."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision, with its reason."""

    choice: Choice
    reason: str
    """Reason in words that follow the choice and a colon."""


def decide(now: Situation) -> Decision:
    """Return what to do with a checkpoint that has just been sealed."""
    age_s, limit_s = now.newest_age_s, now.max_age_s
    if now.bytes_per_s is None:
        return Decision("upload", "the rate of the link is not known yet")
    needed_s = now.nbytes / now.bytes_per_s
    takes = f"it takes {_seconds(needed_s)} at {rate(now.bytes_per_s)}"
    parameters = _parameters(now, needed_s, takes)
    if parameters is not None:
        return parameters
    if now.lifetime_s is not None and needed_s > now.lifetime_s * _MARGIN:
        if now.unmeasured >= 1:
            return Decision("upload", "the link may have become faster, so it is measured again")
        return Decision(
            "skip",
            f"{takes}, and retention recycles it after {_seconds(now.lifetime_s)}: a larger keep= "
            "gives it the time",
        )
    if age_s is None:
        return Decision("upload", f"the tier has no checkpoint yet; {takes}")
    # What the age would be if only the next checkpoint were sent.
    next_s = age_s + (now.interval_s or 0.0) + _MARGIN * needed_s
    if limit_s is not None and next_s > limit_s:
        return Decision(
            "upload",
            f"the newest in the tier is {_seconds(age_s)} old, and would become older than "
            f"{_seconds(limit_s)}; {takes}",
        )
    slowed = (now.slowdown or 0.0) * now.busy_share
    if slowed > now.max_slowdown:
        return Decision(
            "thin",
            f"uploads slow training down by {slowed:.1%}, at most {now.max_slowdown:.1%} is "
            "allowed",
        )
    if limit_s is not None:
        return Decision(
            "keep",
            f"the newest in the tier is {_seconds(age_s)} old, and {_seconds(limit_s)} are allowed",
        )
    return Decision("upload", takes)


def parameters_due(now: Situation) -> bool:
    """Return whether the parameters in the tier become too old without those of this checkpoint."""
    if now.bytes_per_s is None or now.parameter_bytes is None or now.max_age_s is None:
        return True
    if now.parameters_age_s is None:
        return True
    needed_s = _MARGIN * now.parameter_bytes / now.bytes_per_s
    return now.parameters_age_s + (now.interval_s or 0.0) + needed_s > now.max_age_s


def _parameters(now: Situation, needed_s: float, takes: str) -> Decision | None:
    """Return the decision if the link carries parameters in time, but not whole checkpoints."""
    if now.parameter_bytes is None or now.bytes_per_s is None:
        return None
    interval_s, limit_s = now.interval_s or 0.0, now.max_age_s
    first_s = now.parameter_bytes / now.bytes_per_s
    if limit_s is not None:
        # The next checkpoint can be sent when this one is complete.
        whole_fits = max(interval_s, _MARGIN * needed_s) + _MARGIN * needed_s <= limit_s
        first_fits = interval_s + _MARGIN * first_s <= limit_s
        if whole_fits or not first_fits:
            return None
        if not parameters_due(now):
            return Decision(
                "keep",
                f"the newest parameters in the tier are {_seconds(now.parameters_age_s or 0.0)} "
                f"old, and {_seconds(limit_s)} are allowed",
            )
        why = f"too long for an age of {_seconds(limit_s)}"
    elif (
        now.lifetime_s is None
        or needed_s <= now.lifetime_s * _MARGIN
        or first_s > now.lifetime_s / _MARGIN
    ):
        return None
    else:
        why = f"and retention recycles it after {_seconds(now.lifetime_s)}"
    return Decision("parameters", f"{takes}, {why}; the parameters take {_seconds(first_s)}")


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value >= 10 else f"{value:.1f} s"


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
    """Measured rates and times; all methods may be called from any thread."""

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
                new_s, old_s = now - self._last_sealed_s, self._interval_s
                self._interval_s = (
                    new_s if old_s is None else (1 - _WEIGHT) * old_s + _WEIGHT * new_s
                )
            self._last_sealed_s = now
            return now

    def now(self) -> float:
        """Return the time on this clock."""
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
