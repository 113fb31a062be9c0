"""Statistics of measurements: ratios of alternating pairs, and steadiness.

Rates are steady by the rule of the *Solid State Storage Performance Test Specification* (SNIA SSS
PTS, version 2.0): over a window of five rounds, the range of the values is at most 20 % of their
average, and the excursion of the best linear fit over the window is at most 10 % of the average. At
most 25 rounds are run. In PTS a round takes a minute; here it takes as long as a run of the
workload.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

MIN_PAIRS = 11
"""Least number of pairs for a verdict. With fewer pairs, the interval of the median would hardly be
narrower than the range of the values."""

_RESAMPLES = 10_000
_SEED = 20_240_229


def median(values: Sequence[float]) -> float:
    """Return the median; NaN if there are no values."""
    return float(np.median(np.asarray(values, dtype=np.float64))) if len(values) else math.nan


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return a bootstrap interval of the median, of 90 %, from medians of resampled values."""
    if not values:
        raise ValueError("an interval needs at least one value")
    data = np.asarray(values, dtype=np.float64)
    picks = np.random.default_rng(_SEED).integers(0, data.size, size=(_RESAMPLES, data.size))
    medians = np.median(data[picks], axis=1)
    low, high = np.percentile(medians, [5, 95])
    return float(low), float(high)


class Spread(NamedTuple):
    """The median of values, with the ends of its interval."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Return the median and its interval; see `median_interval`."""
    return Spread(median(values), *median_interval(values))


def alternate(
    measure: Mapping[str, Callable[[], float]],
    rounds: int,
    *,
    report: Callable[[str], None] | None = None,
    show: Callable[[float], str] = "{:.4g}".format,
) -> dict[str, list[float]]:
    """Take one sample of each measurement in every round, and reverse the order in every round.

    Two neighbours in `measure` are also neighbours in time, and each of them comes first equally
    often. So a drift of the machine's speed does not favour either of them.
    """
    samples: dict[str, list[float]] = {name: [] for name in measure}
    order = list(measure)
    for number in range(rounds):
        for name in order if number % 2 == 0 else reversed(order):
            samples[name].append(measure[name]())
        if report is not None:
            values = ", ".join(f"{name} {show(samples[name][-1])}" for name in order)
            report(f"  round {number + 1}/{rounds}: {values}")
    return samples


def ratios(numerator: Sequence[float], denominator: Sequence[float]) -> list[float]:
    """Return the ratio of each pair; a ratio is infinite if its denominator is zero."""
    return [a / b if b else math.inf for a, b in zip(numerator, denominator, strict=True)]


# Shares of the average: the largest range of steady values, and excursion of their linear fit.
RANGE_LIMIT: Final = 0.20
SLOPE_LIMIT: Final = 0.10

TREND_CORRELATION: Final = 0.5
"""Least correlation of rates with time, of either sign, if the rates are to rise or to fall."""

WINDOW_ROUNDS: Final = 5
"""Number of rounds in the window of the rule, and least number of intervals to judge."""

MOST_ROUNDS: Final = 25

# What is neither too few nor too short.
LEAST_RUNS: Final = 3
LEAST_RUN_S: Final = 1.0
LEAST_TOTAL_S: Final = 5.0


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
    """Return the rise of the best linear fit over all values, as a share of their average."""
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
    slope = slope_share(intervals)
    correlation = float(np.corrcoef(np.arange(len(intervals)), np.asarray(intervals))[0, 1])
    if abs(slope) <= SLOPE_LIMIT or abs(correlation) < TREND_CORRELATION:
        return "uneven", f"uneven: {_span(min(intervals), max(intervals))} between intervals"
    part = max(len(intervals) // WINDOW_ROUNDS, 1)
    first, last = float(np.mean(intervals[:part])), float(np.mean(intervals[-part:]))
    word = "falling" if slope < 0 else "rising"
    return word, f"{word}: {first / 1e9:.3g} GB/s at the start, {last / 1e9:.3g} GB/s at the end"


def _span(low: float, high: float) -> str:
    return f"{low / 1e9:.3g} to {high / 1e9:.3g} GB/s"
