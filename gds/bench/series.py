"""Time series of a run: bytes, requests and latencies of each interval, for cliffs and throttling.

The time axis counts measured time only. Syncs, and the preparation of the page cache between
passes, take none of it.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Final, TextIO

import numpy as np

_COUNT, _SUM, _MAX = range(3)
_READ, _WRITE = range(2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """What ended in one interval of a run. A request counts where it ends."""

    start_s: float
    """Start of the interval in seconds, from the start of the measured time."""

    length_s: float
    """Length of the interval in seconds; the last interval of a run may be shorter than others."""

    read_bytes_per_s: float
    """Rate of reads, in bytes per second."""

    write_bytes_per_s: float
    """Rate of writes, in bytes per second."""

    num_reads: int
    """Number of reads."""

    num_writes: int
    """Number of writes."""

    read_latency_mean_s: float | None
    """Mean latency of the reads, in seconds; None without reads."""

    read_latency_max_s: float | None
    """Largest latency of the reads, in seconds; None without reads."""

    write_latency_mean_s: float | None
    """Mean latency of the writes, in seconds; None without writes."""

    write_latency_max_s: float | None
    """Largest latency of the writes, in seconds; None without writes."""

    @property
    def bytes_per_s(self) -> float:
        """Rate of reads and writes together, in bytes per second."""
        return self.read_bytes_per_s + self.write_bytes_per_s


class Series:
    """Collects the ends of requests into intervals.

    The memory that it takes grows with the measured time, not with the number of requests.
    """

    def __init__(self, interval_s: float, request_bytes: int) -> None:
        """Begin an empty series."""
        self._interval_s = interval_s
        self._request_bytes = request_bytes
        self._sums = np.zeros((0, 2, 3))

    def add(
        self,
        ended_s: np.ndarray[Any, Any],
        latency_s: np.ndarray[Any, Any],
        is_read: np.ndarray[Any, Any],
    ) -> None:
        """Add requests, all three arrays of shape (requests,).

        Args:
            ended_s: End of each request in seconds on the time axis of the run.
            latency_s: Latency of each request in seconds.
            is_read: Whether each request is a read, dtype bool.
        """
        if not ended_s.size:
            return
        places = np.maximum(np.ceil(ended_s / self._interval_s).astype(np.int64) - 1, 0)
        missing = int(places.max()) + 1 - len(self._sums)
        if missing > 0:
            self._sums = np.concatenate([self._sums, np.zeros((missing, 2, 3))])
        for direction, chosen in ((_READ, is_read), (_WRITE, ~is_read)):
            np.add.at(self._sums[:, direction, _COUNT], places[chosen], 1)
            np.add.at(self._sums[:, direction, _SUM], places[chosen], latency_s[chosen])
            np.maximum.at(self._sums[:, direction, _MAX], places[chosen], latency_s[chosen])

    def intervals(self, elapsed_s: float) -> tuple[Interval, ...]:
        """Return the intervals of a run of `elapsed_s` seconds, also those without any request."""
        count = max(len(self._sums), math.ceil(round(elapsed_s / self._interval_s, 9)))
        sums = np.concatenate([self._sums, np.zeros((count - len(self._sums), 2, 3))])
        return tuple(self._interval(number, sums[number], elapsed_s) for number in range(count))

    def _interval(self, number: int, sums: np.ndarray[Any, Any], elapsed_s: float) -> Interval:
        """Return one interval from its sums, shape (direction, sum)."""
        start_s = number * self._interval_s
        length_s = min(self._interval_s, max(elapsed_s - start_s, 1e-9))
        reads, writes = (int(sums[direction, _COUNT]) for direction in (_READ, _WRITE))
        return Interval(
            start_s=start_s,
            length_s=length_s,
            read_bytes_per_s=reads * self._request_bytes / length_s,
            write_bytes_per_s=writes * self._request_bytes / length_s,
            num_reads=reads,
            num_writes=writes,
            read_latency_mean_s=float(sums[_READ, _SUM] / reads) if reads else None,
            read_latency_max_s=float(sums[_READ, _MAX]) if reads else None,
            write_latency_mean_s=float(sums[_WRITE, _SUM] / writes) if writes else None,
            write_latency_max_s=float(sums[_WRITE, _MAX]) if writes else None,
        )


INTERVAL_FIELDS: Final = tuple(each.name for each in fields(Interval))
"""Names of the values of an interval, in the order of the columns of a CSV file."""


def whole_rates(intervals: Iterable[Interval], interval_s: float) -> list[float]:
    """Return the rates in bytes per second of all intervals that have their whole length."""
    return [each.bytes_per_s for each in intervals if each.length_s > 0.999 * interval_s]


def write_csv(file: TextIO, rows: Iterable[tuple[dict[str, Any], Interval]]) -> None:
    """Write intervals as CSV with a header; None is an empty cell.

    Args:
        file: Text file that was opened with ``newline=""``.
        rows: Columns that name the run, the same for all rows, and an interval of the run.
    """
    writer = csv.writer(file, lineterminator="\n")
    for number, (names, interval) in enumerate(rows):
        if number == 0:
            writer.writerow([*names, *INTERVAL_FIELDS])
        writer.writerow([*names.values(), *(getattr(interval, name) for name in INTERVAL_FIELDS)])
