"""Results of one run of a workload: rates and latencies of each direction, and a time series.

The time axis counts measured time only. Syncs, and the preparation of the page cache between
passes, take none of it.
"""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, TextIO

import numpy as np

_COUNT, _SUM, _MAX = range(3)
_READ, _WRITE = range(2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """What ended in one interval of a run, counted from the start of the measured time.

    The last interval of a run may be shorter than the others. A latency is None without requests.
    """

    start_s: float
    length_s: float
    read_bytes_per_s: float
    write_bytes_per_s: float
    num_reads: int
    num_writes: int
    read_latency_mean_s: float | None
    read_latency_max_s: float | None
    write_latency_mean_s: float | None
    write_latency_max_s: float | None

    @property
    def bytes_per_s(self) -> float:
        """Rate of reads and writes together, in bytes per second."""
        return self.read_bytes_per_s + self.write_bytes_per_s


class Series:
    """Collects the ends of requests into intervals, in memory that grows with the measured time."""

    def __init__(self, interval_s: float, request_bytes: int) -> None:
        self._interval_s = interval_s
        self._request_bytes = request_bytes
        self._sums = np.zeros((0, 2, 3))

    def add(
        self,
        ended_s: np.ndarray[Any, Any],
        latency_s: np.ndarray[Any, Any],
        is_read: np.ndarray[Any, Any],
    ) -> None:
        """Add requests, all arrays of shape (requests,), with ends on the time axis of the run."""
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


def whole_rates(intervals: Iterable[Interval], interval_s: float) -> list[float]:
    """Return the rates in bytes per second of all intervals that have their whole length."""
    return [each.bytes_per_s for each in intervals if each.length_s > 0.999 * interval_s]


def write_csv(file: TextIO, rows: Iterable[tuple[dict[str, Any], Interval]]) -> None:
    """Write intervals, each with columns that name its run, as CSV with a header.

    The file is one that was opened with ``newline=""``. None is an empty cell.
    """
    writer = csv.writer(file, lineterminator="\n")
    values = [each.name for each in fields(Interval)]
    for number, (names, interval) in enumerate(rows):
        if number == 0:
            writer.writerow([*names, *values])
        writer.writerow([*names.values(), *(getattr(interval, name) for name in values)])


_FIRST_LIMIT_S: Final = 1e-6
_LIMITS_PER_DOUBLING: Final = 4
_NUM_LIMITS: Final = 30 * _LIMITS_PER_DOUBLING  # up to 1000 s


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Distribution of the latencies of requests. All values are in seconds.

    A latency is the time from the start of a request to its end. A wait for a thread of the
    backend is included; it occurs only if depth exceeds threads. The 99.9th and 99.99th percentile
    of fewer than 1000 and 10,000 requests are the largest value.
    """

    mean_s: float
    stddev_s: float
    min_s: float
    p50_s: float
    p90_s: float
    p99_s: float
    p999_s: float
    p9999_s: float
    max_s: float

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
        p50_s=_percentile(ordered, 50),
        p90_s=_percentile(ordered, 90),
        p99_s=_percentile(ordered, 99),
        p999_s=_percentile(ordered, 99.9),
        p9999_s=_percentile(ordered, 99.99),
        max_s=float(ordered[-1]),
        histogram=_histogram(ordered),
    )


def _percentile(ordered: Sequence[float] | np.ndarray[Any, Any], percent: float) -> float:
    """Return a percentile: the smallest value that at least `percent` % of all do not exceed."""
    rank = math.ceil(round(len(ordered) * percent / 100, 6))  # 99.9 % of 1000 is 999, not 1000
    return float(ordered[max(rank, 1) - 1])


def _histogram(values_s: np.ndarray[Any, Any]) -> tuple[tuple[float, int], ...]:
    limits = _FIRST_LIMIT_S * np.exp2(np.arange(_NUM_LIMITS + 1) / _LIMITS_PER_DOUBLING)
    classes = np.minimum(np.searchsorted(limits, values_s, side="left"), _NUM_LIMITS)
    counts = np.bincount(classes, minlength=limits.size)
    used = np.flatnonzero(counts)
    return tuple((float(limits[n]), int(counts[n])) for n in used)


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """Requests of a run: those of one direction, or of both together."""

    num_requests: int
    num_bytes: int
    elapsed_s: float
    """Measured seconds of the run, whatever the direction."""

    latency: Latency

    @property
    def bytes_per_s(self) -> float:
        """Rate in bytes per second, without the time of the syncs."""
        return self.num_bytes / self.elapsed_s if self.elapsed_s else math.inf

    @property
    def iops(self) -> float:
        """Requests per second."""
        return self.num_requests / self.elapsed_s if self.elapsed_s else math.inf

    def to_json(self) -> dict[str, Any]:
        """Return the results as JSON values. Later versions only add keys."""
        return {
            "num_requests": self.num_requests,
            "num_bytes": self.num_bytes,
            "bytes_per_s": self.bytes_per_s,
            "iops": self.iops,
            **self.latency.to_json(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Results of one run of a workload: of all requests in all passes, and of each direction."""

    total: Requests
    reads: Requests | None
    writes: Requests | None

    lane_bytes_per_s: tuple[float, ...]
    """Rate of each directory in bytes per second, each until the end of its own last request; the
    mean over all passes. For a single directory it is the rate of the run."""

    intervals: tuple[Interval, ...]
    elapsed_s: float
    """Seconds from the start of the first request to the end of the last request, summed over all
    passes. Syncs, the ramp, and the preparation of the page cache between passes, are not
    included."""

    ramp_s: float
    """Seconds of the requests before the measured time, which count nowhere else."""

    sync_s: float
    """Seconds of the syncs after all passes; 0 if nothing was written."""

    cpu_user_s: float
    cpu_system_s: float
    """Processor seconds in the kernel during `elapsed_s`, all threads of this process."""

    pcie_rx_gbps: float | None
    pcie_tx_gbps: float | None
    pcie_samples: int
    pcie_reason: str
    """Reason why the PCIe traffic during `elapsed_s` cannot be read; empty if it can."""

    direct: bool
    cached_before: float | None
    """Share of the file that the page cache held before a pass; the largest value of all passes, or
    None if it is not known."""

    verified_bytes: int
    """Bytes that were compared with the expected data; 0 without verification."""

    @property
    def bytes_per_s(self) -> float:
        """Rate of reads and writes together in bytes per second, without the time of the syncs."""
        return self.total.bytes_per_s

    @property
    def durable_bytes_per_s(self) -> float:
        """Rate of reads and writes together in bytes per second, with the time of the syncs."""
        whole_s = self.elapsed_s + self.sync_s
        return self.total.num_bytes / whole_s if whole_s else math.inf

    @property
    def cpu_cores(self) -> float:
        """Processor seconds per second; 1 is one core that is busy all the time."""
        used_s = self.cpu_user_s + self.cpu_system_s
        return used_s / self.elapsed_s if self.elapsed_s else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the results as JSON values. Later versions only add keys."""
        parts = ("total", "reads", "writes", "intervals")
        plain = {name: getattr(self, name) for name in self.__slots__ if name not in parts}
        return {
            **plain,
            **self.total.to_json(),
            "bytes_read": self.reads.num_bytes if self.reads else 0,
            "bytes_written": self.writes.num_bytes if self.writes else 0,
            "durable_bytes_per_s": self.durable_bytes_per_s,
            "cpu_cores": self.cpu_cores,
            "reads": self.reads.to_json() if self.reads else None,
            "writes": self.writes.to_json() if self.writes else None,
            "series": [dataclasses.asdict(interval) for interval in self.intervals],
        }
