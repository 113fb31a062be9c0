"""Statistics of ratios of adjacent pairs, imported from `gds bench`."""

from gds.bench.statistics import (
    MIN_PAIRS,
    Verdict,
    alternate,
    judge,
    median,
    median_interval,
    ratios,
)

__all__ = ["MIN_PAIRS", "Verdict", "alternate", "judge", "median", "median_interval", "ratios"]
