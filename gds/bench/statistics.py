"""Ratios of adjacent pairs, and how far chance alone could have moved their median."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

MIN_PAIRS = 11
"""Fewer pairs give no verdict: an interval of the median would be little more than the extremes."""

LEVEL = 0.9
_RESAMPLES = 10_000
_SEED = 20_240_229


def median(values: Sequence[float]) -> float:
    """Return the median; NaN of nothing."""
    return float(np.median(np.asarray(values, dtype=np.float64))) if len(values) else math.nan


def median_interval(
    values: Sequence[float], *, level: float = LEVEL, seed: int = _SEED
) -> tuple[float, float]:
    """Return a bootstrap interval of the median: resampled with replacement, percentiles.

    Args:
        values: Independent samples; at least one.
        level: Probability of the interval, between 0 and 1.
        seed: Of the resampling, fixed so that a result can be recomputed from its samples.
    """
    if not values:
        raise ValueError("an interval needs at least one value")
    data = np.asarray(values, dtype=np.float64)
    picks = np.random.default_rng(seed).integers(0, data.size, size=(_RESAMPLES, data.size))
    medians = np.median(data[picks], axis=1)
    tail = 100 * (1 - level) / 2
    low, high = np.percentile(medians, [tail, 100 - tail])
    return float(low), float(high)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The median of some ratios beside the limit that was promised."""

    median: float
    low: float
    high: float
    limit: float | None

    @property
    def met(self) -> bool | None:
        """Whether the lower end of the interval is within the limit; None without a limit."""
        return None if self.limit is None else self.low <= self.limit

    @property
    def clear(self) -> bool | None:
        """Whether the whole interval is within the limit: chance cannot explain it."""
        return None if self.limit is None else self.high <= self.limit

    @property
    def words(self) -> str:
        """The verdict, for people."""
        if self.limit is None:
            return "no limit"
        if self.clear:
            return "met"
        return "met within noise" if self.met else "NOT MET"


def judge(ratios: Sequence[float], limit: float | None) -> Verdict:
    """Return median and interval of `ratios`, beside `limit`."""
    return Verdict(median(ratios), *median_interval(ratios), limit)


def alternate(
    measure: Mapping[str, Callable[[], float]],
    rounds: int,
    *,
    report: Callable[[str], None] | None = None,
) -> dict[str, list[float]]:
    """Take one sample of each in every round, in an order that is reversed from round to round.

    Two neighbours in `measure` are neighbours in time, each of them first as often as the other,
    so that a drift of the machine's speed does not favour one of them.

    Args:
        measure: What to measure, by name; each call returns one sample.
        rounds: Samples of each.
        report: Called after each round with a line for people.
    """
    samples: dict[str, list[float]] = {name: [] for name in measure}
    order = list(measure)
    for number in range(rounds):
        for name in order if number % 2 == 0 else reversed(order):
            samples[name].append(measure[name]())
        if report is not None:
            values = ", ".join(f"{name} {samples[name][-1]:.4g}" for name in order)
            report(f"  round {number + 1}/{rounds}: {values}")
    return samples


def ratios(numerator: Sequence[float], denominator: Sequence[float]) -> list[float]:
    """Divide pair by pair; an infinite ratio where the denominator is zero."""
    return [a / b if b else math.inf for a, b in zip(numerator, denominator, strict=True)]
