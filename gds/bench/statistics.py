"""Statistics of alternating measurements: ratios of pairs, and an interval of their median."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

MIN_PAIRS = 11
"""Least number of pairs for a verdict. With fewer pairs, the interval of the median would hardly be
narrower than the range of the values."""

LEVEL = 0.9
"""Default probability of an interval."""

_RESAMPLES = 10_000
_SEED = 20_240_229


def median(values: Sequence[float]) -> float:
    """Return the median; NaN if there are no values."""
    return float(np.median(np.asarray(values, dtype=np.float64))) if len(values) else math.nan


def median_interval(
    values: Sequence[float], *, level: float = LEVEL, seed: int = _SEED
) -> tuple[float, float]:
    """Return a bootstrap interval of the median, from percentiles of resampled medians.

    Samples are drawn with replacement.
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
    """The median of ratios with its interval, compared with a promised limit."""

    median: float
    """Median of the ratios."""

    low: float
    """Lower end of the median's interval."""

    high: float
    """Upper end of the median's interval."""

    limit: float | None
    """Largest ratio that was promised; None if nothing was."""

    @property
    def met(self) -> bool | None:
        """Whether the lower end of the interval is within the limit; None without a limit."""
        return None if self.limit is None else self.low <= self.limit

    @property
    def clear(self) -> bool | None:
        """Whether the whole interval is within the limit, so that chance cannot explain the result.

        None without a limit.
        """
        return None if self.limit is None else self.high <= self.limit

    @property
    def words(self) -> str:
        """Verdict in words, for people."""
        if self.limit is None:
            return "no limit"
        if self.clear:
            return "met"
        return "met within noise" if self.met else "NOT MET"


def judge(ratios: Sequence[float], limit: float | None) -> Verdict:
    """Return the verdict on ratios; `limit` is the promised limit, or None."""
    return Verdict(median(ratios), *median_interval(ratios), limit)


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
