"""Which threads and request size to use, from measured rates. Pure: nothing here measures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

MIB: Final = 1 << 20

NUM_THREADS: Final = (1, 2, 4, 8)
REQUEST_BYTES: Final = (32 * MIB, 16 * MIB, 8 * MIB, 4 * MIB)

MOST_IN_FLIGHT_BYTES: Final = 64 * MIB
"""In each direction. More keeps no drive busier, and would need buffers for it."""

TIE: Final = 0.05
"""A difference up to this fraction is no reason to prefer one setting to another."""

_MOST_DOUBT: Final = 0.15
"""However noisy the rates: a setting that is this fraction slower than the best is not taken."""

_NUM_KEPT: Final = 3


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to run transfers, in each of the two directions."""

    threads: int
    request_bytes: int

    @property
    def in_flight_bytes(self) -> int:
        """Bytes that are being transferred at once, in each direction."""
        return self.threads * self.request_bytes


DEFAULT: Final = Setting(threads=2, request_bytes=32 * MIB)
"""Right for one NVMe drive, and never far off: what is used where nothing could be measured."""

Round: TypeAlias = Mapping[Setting, float]
"""Rates, in any one unit, that were measured one shortly after another."""


def candidates(most_in_flight_bytes: int) -> list[Setting]:
    """Return the settings worth trying, those that tell most about a drive first.

    First each number of threads with its largest requests, then with the next smaller ones, so
    that any beginning of the list is a sensible choice for a drive too slow to try all.
    """
    limit = min(most_in_flight_bytes, MOST_IN_FLIGHT_BYTES)
    ranked = []
    for threads in NUM_THREADS:
        fitting = [Setting(threads, size) for size in REQUEST_BYTES if threads * size <= limit]
        ranked += [(rank, threads, setting) for rank, setting in enumerate(fitting)]
    return [setting for _, _, setting in sorted(ranked, key=lambda entry: entry[:2])]


def choose(rounds: Sequence[Round]) -> Setting:
    """Return the simplest setting that is as fast as the fastest, as far as the rates can tell.

    Simplest is fewest threads, then largest requests. "As fast" is within `TIE`, or within what
    chance explains where the rates scatter more than that. Only settings that are in every round
    count: the others were given up, and a single lucky rate says little.

    Args:
        rounds: In the order of measuring; at least one, with a setting that is in all of them.
    """
    scores = _scores(rounds)
    return _simplest(_in_all(rounds), scores, _tolerance(rounds, scores))


def survivors(rounds: Sequence[Round]) -> list[Setting]:
    """Return the settings to measure in the next round, so that time goes to the close decisions.

    After the first round that is one for each number of threads, and the fastest; later the
    fastest few. The present choice always is among them.
    """
    scores = _scores(rounds)
    tolerance = _tolerance(rounds, scores)
    finalists = _in_all(rounds)
    fastest = sorted(finalists, key=lambda setting: scores[setting], reverse=True)
    if len(rounds) == 1:
        groups = [[s for s in finalists if s.threads == threads] for threads in NUM_THREADS]
        kept = [_simplest(group, scores, tolerance) for group in groups if group] + fastest[:1]
    else:
        kept = [*fastest[:_NUM_KEPT], _simplest(finalists, scores, tolerance)]
    return list(dict.fromkeys(kept))


def _simplest(
    settings: Sequence[Setting], scores: Mapping[Setting, float], tolerance: float
) -> Setting:
    enough = max(scores[setting] for setting in settings) * (1 - tolerance)
    as_fast = [setting for setting in settings if scores[setting] >= enough]
    return min(as_fast, key=lambda setting: (setting.threads, -setting.request_bytes))


def _tolerance(rounds: Sequence[Round], scores: Mapping[Setting, float]) -> float:
    """Return by which fraction two scores can differ and still be a tie."""
    # Three standard errors of a difference: several settings compete to be the lucky one.
    doubt = 3 * _noise(rounds, scores) * math.sqrt(2 / len(rounds))
    return min(max(TIE, doubt), _MOST_DOUBT)


def _in_all(rounds: Sequence[Round]) -> list[Setting]:
    return [setting for setting in rounds[0] if all(setting in rates for rates in rounds)]


def _relative(rounds: Sequence[Round]) -> dict[Setting, list[float]]:
    """Return each setting's rates, relative to the mean of those that are in every round.

    A drive that gets slower as it fills its cache, or that others use as well, changes from round
    to round far more than settings differ; within a round it treats them alike.
    """
    common = _in_all(rounds)
    relative: dict[Setting, list[float]] = {}
    for rates in rounds:
        mean = statistics.fmean(rates[setting] for setting in common)
        for setting, rate in rates.items():
            relative.setdefault(setting, []).append(rate / mean)
    return relative


def _scores(rounds: Sequence[Round]) -> dict[Setting, float]:
    return {setting: statistics.median(rates) for setting, rates in _relative(rounds).items()}


def _noise(rounds: Sequence[Round], scores: Mapping[Setting, float]) -> float:
    """Return the relative standard deviation of one rate; infinite where none was repeated."""
    square, freedom = 0.0, 0
    for setting, rates in _relative(rounds).items():
        square += sum((rate / scores[setting] - 1) ** 2 for rate in rates)
        freedom += len(rates) - 1
    return math.sqrt(square / freedom) if freedom else math.inf
