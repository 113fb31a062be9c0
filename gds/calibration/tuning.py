"""Choice of threads and request size from measured rates. Pure: this module measures nothing."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

MIB: Final = 1 << 20

NUM_THREADS: Final = (1, 2, 4, 8)
"""Numbers of threads to try."""

REQUEST_BYTES: Final = (32 * MIB, 16 * MIB, 8 * MIB, 4 * MIB)
"""Request sizes to try, in bytes."""

MOST_IN_FLIGHT_BYTES: Final = 64 * MIB
"""Largest number of bytes in flight in each direction. More keeps no drive busier, and needs larger
buffers."""

TIE: Final = 0.05
"""Largest relative difference between two rates that is no reason to prefer one setting."""

_MOST_DOUBT: Final = 0.15
"""Largest relative difference that noise can excuse: a setting that is slower than the best by more
than this is never chosen, however noisy the rates are."""

_NUM_KEPT: Final = 3
"""Number of fastest settings that stay after the second round and later ones."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings of the transfers, the same in both directions."""

    threads: int
    """Number of threads in each direction."""

    request_bytes: int
    """Largest request to the kernel, in bytes."""


DEFAULT: Final = Setting(threads=2, request_bytes=32 * MIB)
"""Setting that is used if nothing can be measured. It is right for one NVMe drive, and good enough
for others."""

Round: TypeAlias = Mapping[Setting, float]
"""Rates by setting, all in the same unit, measured one shortly after another."""


def candidates(most_in_flight_bytes: int) -> list[Setting]:
    """Return the settings to try, in the order of what they reveal about a drive.

    The list begins with each number of threads at its largest request size, followed by each number
    at the next smaller size, and so on. So any beginning of the list is a sensible choice for a
    drive that is too slow for all settings.

    Args:
        most_in_flight_bytes: Largest number of bytes in flight in each direction;
            `MOST_IN_FLIGHT_BYTES` limits it further.
    """
    limit = min(most_in_flight_bytes, MOST_IN_FLIGHT_BYTES)
    ranked = []
    for threads in NUM_THREADS:
        fitting = [Setting(threads, size) for size in REQUEST_BYTES if threads * size <= limit]
        ranked += [(rank, threads, setting) for rank, setting in enumerate(fitting)]
    return [setting for _, _, setting in sorted(ranked, key=lambda entry: entry[:2])]


def choose(rounds: Sequence[Round]) -> Setting:
    """Return the simplest setting that is as fast as the fastest, as far as the rates can tell.

    The simplest setting has the fewest threads, then the largest requests. A setting is as fast as
    another if the difference is at most `TIE`, or if the rates scatter so much that chance explains
    the difference. Only settings that are in every round count: the others were dropped, and a
    single lucky rate says little.

    Args:
        rounds: Rounds in the order of measurement, at least one. At least one setting must be in
            all of them.
    """
    scores = _scores(rounds)
    return _simplest(_in_all(rounds), scores, _tolerance(rounds, scores))


def survivors(rounds: Sequence[Round]) -> list[Setting]:
    """Return the settings to measure in the next round, so that the time goes to close decisions.

    After the first round these are one setting for each number of threads, and the fastest one.
    After later rounds these are the fastest few. The setting that `choose` would return now is
    always included.
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
    """Return the simplest of the settings whose score is within `tolerance` of the best."""
    enough = max(scores[setting] for setting in settings) * (1 - tolerance)
    as_fast = [setting for setting in settings if scores[setting] >= enough]
    return min(as_fast, key=lambda setting: (setting.threads, -setting.request_bytes))


def _tolerance(rounds: Sequence[Round], scores: Mapping[Setting, float]) -> float:
    """Return the largest relative difference between two scores that counts as a tie."""
    # Three standard errors of a difference, because several settings can be the lucky one.
    doubt = 3 * _noise(rounds, scores) * math.sqrt(2 / len(rounds))
    return min(max(TIE, doubt), _MOST_DOUBT)


def _in_all(rounds: Sequence[Round]) -> list[Setting]:
    """Return the settings that are in every round."""
    return [setting for setting in rounds[0] if all(setting in rates for rates in rounds)]


def _relative(rounds: Sequence[Round]) -> dict[Setting, list[float]]:
    """Return each setting's rates, divided by the round's mean of the settings in every round.

    A drive gets slower as its cache fills, and other programs may use it. So its rate changes from
    round to round far more than settings differ. Within a round, it treats all settings alike.
    """
    common = _in_all(rounds)
    relative: dict[Setting, list[float]] = {}
    for rates in rounds:
        mean = statistics.fmean(rates[setting] for setting in common)
        for setting, rate in rates.items():
            relative.setdefault(setting, []).append(rate / mean)
    return relative


def _scores(rounds: Sequence[Round]) -> dict[Setting, float]:
    """Return the median of each setting's relative rates."""
    return {setting: statistics.median(rates) for setting, rates in _relative(rounds).items()}


def _noise(rounds: Sequence[Round], scores: Mapping[Setting, float]) -> float:
    """Return the relative standard deviation of a rate; infinite if no rate was repeated."""
    square, freedom = 0.0, 0
    for setting, rates in _relative(rounds).items():
        square += sum((rate / scores[setting] - 1) ** 2 for rate in rates)
        freedom += len(rates) - 1
    return math.sqrt(square / freedom) if freedom else math.inf
