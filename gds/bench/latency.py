"""Latencies of requests: mean, spread, percentiles and a histogram."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

_FIRST_LIMIT_S: Final = 1e-6
_LIMITS_PER_DOUBLING: Final = 4
_NUM_LIMITS: Final = 30 * _LIMITS_PER_DOUBLING  # up to 1000 s


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Distribution of the latencies of requests. All values are in seconds.

    A latency is the time from the start of a request to its end. A wait for a thread of the
    backend is included; it occurs only if depth exceeds threads.
    """

    mean_s: float
    """Mean."""

    stddev_s: float
    """Standard deviation; 0 for a single request."""

    min_s: float
    """Smallest value."""

    p50_s: float
    """Median."""

    p90_s: float
    """90th percentile."""

    p99_s: float
    """99th percentile."""

    p999_s: float
    """99.9th percentile. With fewer than 1000 requests it is the largest value."""

    p9999_s: float
    """99.99th percentile. With fewer than 10,000 requests it is the largest value."""

    max_s: float
    """Largest value."""

    histogram: tuple[tuple[float, int], ...]
    """Pairs of an upper limit in seconds and the number of requests below or at it that are above
    the limit before. Limits are 1 µs times powers of the fourth root of 2, the same for all
    workloads, so that histograms can be added. Empty classes are left out."""

    def to_json(self) -> dict[str, Any]:
        """Return the values as JSON values, with keys such as ``latency_p99_s``."""
        names = (name for name in self.__slots__ if name != "histogram")
        return {
            **{f"latency_{name}": getattr(self, name) for name in names},
            "latency_histogram": [[limit_s, count] for limit_s, count in self.histogram],
        }


def latency_of(values_s: np.ndarray[Any, Any]) -> Latency:
    """Return the distribution of latencies."""
    ordered = np.sort(values_s)
    return Latency(
        mean_s=float(ordered.mean()),
        stddev_s=float(ordered.std()),
        min_s=float(ordered[0]),
        p50_s=percentile(ordered, 50),
        p90_s=percentile(ordered, 90),
        p99_s=percentile(ordered, 99),
        p999_s=percentile(ordered, 99.9),
        p9999_s=percentile(ordered, 99.99),
        max_s=float(ordered[-1]),
        histogram=histogram(ordered),
    )


def percentile(ordered: Sequence[float] | np.ndarray[Any, Any], percent: float) -> float:
    """Return a percentile: the smallest value that at least `percent` % of all do not exceed."""
    rank = math.ceil(round(len(ordered) * percent / 100, 6))  # 99.9 % of 1000 is 999, not 1000
    return float(ordered[max(rank, 1) - 1])


def histogram(values_s: np.ndarray[Any, Any]) -> tuple[tuple[float, int], ...]:
    """Return the histogram of latencies in seconds; see `Latency.histogram`."""
    limits = _FIRST_LIMIT_S * np.exp2(np.arange(_NUM_LIMITS + 1) / _LIMITS_PER_DOUBLING)
    classes = np.minimum(np.searchsorted(limits, values_s, side="left"), _NUM_LIMITS)
    counts = np.bincount(classes, minlength=limits.size)
    used = np.flatnonzero(counts)
    return tuple((float(limits[n]), int(counts[n])) for n in used)
