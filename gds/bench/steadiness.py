"""Verdict on the steadiness of rates, by the steady-state rule of SNIA's PTS.

The rule is that of the *Solid State Storage Performance Test Specification* (SNIA SSS PTS, version
2.0): over a window of five rounds, the range of the values is at most 20 % of their average, and
the excursion of the best linear fit over the window is at most 10 % of the average. At most 25
rounds are run. In PTS a round takes a minute; here it takes as long as a run of the workload.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

RANGE_LIMIT: Final = 0.20
"""Largest range (maximum minus minimum) of steady values, as a share of their average."""

SLOPE_LIMIT: Final = 0.10
"""Largest excursion of the linear fit of steady values, as a share of their average."""

TREND_CORRELATION: Final = 0.5
"""Least correlation of rates with time, of either sign, if the rates are to rise or to fall."""

WINDOW_ROUNDS: Final = 5
"""Number of rounds in the window of the rule, and least number of intervals to judge."""

MOST_ROUNDS: Final = 25
"""Number of rounds after which the search for a steady window ends."""

LEAST_RUNS: Final = 3
"""Least number of runs that show a spread."""

LEAST_RUN_S: Final = 1.0
"""Least seconds of a run that is not too short."""

LEAST_TOTAL_S: Final = 5.0
"""Least seconds of all runs together that are not too short."""


@dataclass(frozen=True, slots=True)
class Stability:
    """Verdict on the rates of a workload."""

    word: str
    """``steady``, ``unstable``, ``falling``, ``rising``, ``uneven``, ``too short`` or ``too few``:
    the gravest finding."""

    reasons: tuple[str, ...]
    """Each finding with its numbers, for people; the gravest first. Empty if `word` is steady."""

    @property
    def words(self) -> str:
        """Verdict with its reasons, for people."""
        return "; ".join(self.reasons) or self.word


def range_share(values: Sequence[float]) -> float:
    """Return the range of values as a share of their average; 0 if the average is 0."""
    mean = float(np.mean(values))
    return (max(values) - min(values)) / mean if mean else 0.0


def slope_share(values: Sequence[float]) -> float:
    """Return the rise of the best linear fit over all values, as a share of their average.

    The result is negative if the fit falls, and 0 for less than two values.
    """
    mean = float(np.mean(values))
    if len(values) < 2 or not mean:
        return 0.0
    slope = float(np.polyfit(np.arange(len(values)), np.asarray(values), 1)[0])
    return slope * (len(values) - 1) / mean


def is_steady(values: Sequence[float]) -> bool:
    """Return whether values keep both limits of the rule: that of the range and of the slope."""
    return range_share(values) <= RANGE_LIMIT and abs(slope_share(values)) <= SLOPE_LIMIT


def window_is_steady(rounds: Sequence[float]) -> bool:
    """Return whether the last `WINDOW_ROUNDS` values are there and are steady."""
    return len(rounds) >= WINDOW_ROUNDS and is_steady(rounds[-WINDOW_ROUNDS:])


def assess(
    rates: Sequence[float], seconds: Sequence[float], intervals: Sequence[float]
) -> Stability:
    """Return the verdict on a workload."""
    found: list[tuple[str, str]] = []
    if len(rates) > 1 and range_share(rates) > RANGE_LIMIT:
        found.append(("unstable", f"unstable: {_span(min(rates), max(rates))} between runs"))
    if len(intervals) >= WINDOW_ROUNDS and not is_steady(intervals):
        found.append(_trend(intervals))
    if min(seconds) < LEAST_RUN_S:
        reason = f"a run of {min(seconds):.2g} s, less than {LEAST_RUN_S:g} s"
        found.append(("too short", f"too short: {reason}"))
    elif sum(seconds) < LEAST_TOTAL_S:
        reason = f"{sum(seconds):.2g} s in all runs, less than {LEAST_TOTAL_S:g} s"
        found.append(("too short", f"too short: {reason}"))
    if len(rates) < LEAST_RUNS:
        reason = f"{len(rates)} {'runs' if len(rates) > 1 else 'run'}, less than {LEAST_RUNS}"
        found.append(("too few", f"too few runs: {reason}"))
    if not found:
        return Stability("steady", ())
    return Stability(found[0][0], tuple(reason for _, reason in found))


def _trend(intervals: Sequence[float]) -> tuple[str, str]:
    """Return the word and the reason for intervals that are not steady."""
    slope = slope_share(intervals)
    correlation = float(np.corrcoef(np.arange(len(intervals)), np.asarray(intervals))[0, 1])
    if abs(slope) <= SLOPE_LIMIT or abs(correlation) < TREND_CORRELATION:
        return "uneven", f"uneven: {_span(min(intervals), max(intervals))} between intervals"
    part = max(len(intervals) // WINDOW_ROUNDS, 1)
    first, last = float(np.mean(intervals[:part])), float(np.mean(intervals[-part:]))
    word = "falling" if slope < 0 else "rising"
    return word, f"{word}: {first / 1e9:.3g} GB/s at the start, {last / 1e9:.3g} GB/s at the end"


def _span(low: float, high: float) -> str:
    """Return two rates in bytes per second as text in GB/s."""
    return f"{low / 1e9:.3g} to {high / 1e9:.3g} GB/s"
