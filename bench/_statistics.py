"""Statistics of ratios of adjacent pairs, imported from `gds bench`, and the verdict on a limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gds.bench.statistics import (
    MIN_PAIRS,
    alternate,
    median,
    median_interval,
    ratios,
)

__all__ = ["MIN_PAIRS", "Verdict", "alternate", "judge", "median", "median_interval", "ratios"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The median of ratios with its interval, compared with a promised limit."""

    median: float
    low: float
    high: float
    limit: float | None
    """Largest ratio that was promised; None if nothing was."""

    @property
    def met(self) -> bool | None:
        """Whether the lower end of the interval is within the limit; None without a limit."""
        return None if self.limit is None else self.low <= self.limit

    @property
    def words(self) -> str:
        """Verdict in words, for people."""
        if self.limit is None:
            return "no limit"
        if self.high <= self.limit:  # chance cannot explain it
            return "met"
        return "met within noise" if self.met else "NOT MET"


def judge(ratios: Sequence[float], limit: float | None) -> Verdict:
    """Return the verdict on ratios."""
    return Verdict(median(ratios), *median_interval(ratios), limit)
