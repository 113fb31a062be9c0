"""Ratios of adjacent pairs: the same statistics as those of `gds bench`, which holds them."""

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
