"""Report of `gds bench`: results of every workload, with a verdict, as JSON and as CSV."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TextIO

from gds.bench.compare import Comparison
from gds.bench.result import Requests, Run
from gds.bench.series import Interval, whole_rates
from gds.bench.statistics import median
from gds.bench.steadiness import WINDOW_ROUNDS, Stability, assess, window_is_steady
from gds.bench.workload import Workload

SCHEMA: Final = 1
"""Version of the JSON form."""

Part = Literal["total", "reads", "writes"]

LATENCIES: Final = ("mean_s", "stddev_s", "p50_s", "p99_s", "p999_s", "max_s")
"""Names of the latencies that are summarised over the runs."""


@dataclass(slots=True)
class Point:
    """A workload with the results of its runs."""

    workload: Workload
    """The workload."""

    runs: list[Run] = field(default_factory=list)
    """Results in the order of the runs."""

    until_steady: bool = False
    """Whether runs were added until the last of them were steady; only those are summarised."""

    @property
    def counted(self) -> Sequence[Run]:
        """Runs that the summary is made of: all, or the last window of a search for steadiness."""
        return self.runs[-WINDOW_ROUNDS:] if self.until_steady else self.runs

    @property
    def found_steady(self) -> bool | None:
        """Whether the search for steadiness succeeded; None without a search."""
        if not self.until_steady:
            return None
        return window_is_steady([run.bytes_per_s for run in self.runs])

    def median(self, name: str) -> float:
        """Return the median of a number over the runs; `name` is an attribute of `Run`."""
        return median([getattr(run, name) for run in self.counted])

    def parts(self, part: Part) -> list[Requests]:
        """Return the requests of one direction, or all of them, in each of the runs."""
        return [each for run in self.counted if (each := getattr(run, part)) is not None]

    def rates(self, part: Part = "total") -> list[float]:
        """Return the rate of each run in bytes per second."""
        return [each.bytes_per_s for each in self.parts(part)]

    def latency(self, name: str, part: Part = "total") -> float:
        """Return a latency in seconds: the largest of all runs for ``max_s``, else the median."""
        values = [float(getattr(each.latency, name)) for each in self.parts(part)]
        return max(values) if name == "max_s" else median(values)

    @property
    def stability(self) -> Stability:
        """Verdict on the rates of the runs, and of the intervals in them."""
        runs = self.counted
        step_s = self.workload.interval_s
        found = assess(
            self.rates(),
            [run.elapsed_s for run in runs],
            [rate for run in runs for rate in whole_rates(run.intervals, step_s)],
        )
        if self.found_steady is False:
            reason = f"not steady after {len(self.runs)} rounds"
            return Stability("not steady", (reason, *found.reasons))
        return found

    def summary(self, part: Part) -> dict[str, float]:
        """Return the medians over the runs, of one direction or of all requests."""
        return {
            "bytes_per_s": median(self.rates(part)),
            "iops": median([each.iops for each in self.parts(part)]),
            **{f"latency_{name}": self.latency(name, part) for name in LATENCIES},
        }

    def to_json(self) -> dict[str, Any]:
        """Return the results as JSON values. Later versions only add keys."""
        rates = self.rates()
        mixed = self.workload.num_reads and self.workload.num_writes
        middles = {
            name: self.median(name) for name in ("durable_bytes_per_s", "cpu_cores", "sync_s")
        }
        return {
            "workload": dataclasses.asdict(self.workload),
            "median": {**self.summary("total"), **middles},
            "median_reads": self.summary("reads") if mixed else None,
            "median_writes": self.summary("writes") if mixed else None,
            "lowest_bytes_per_s": min(rates),
            "highest_bytes_per_s": max(rates),
            "verdict": self.stability.word,
            "verdict_reasons": list(self.stability.reasons),
            "steady": self.found_steady,
            "num_counted_runs": len(rates),
            "runs": [run.to_json() for run in self.runs],
        }


@dataclass(slots=True)
class Report:
    """All results of one call of `gds bench`."""

    places: Sequence[str]
    """Directories or files that were measured at the same time."""

    made: bool
    """Whether the file was a scratch file; otherwise it was an existing file of the user."""

    file_bytes: int
    """Size of the file, in bytes."""

    filesystem: str
    """Type of the file system."""

    source: str
    """Mounted device or share; empty if not known."""

    kernel: str
    """Release of the kernel."""

    cores: int
    """Number of cores that the process may use."""

    verify: bool
    """Whether the data was verified."""

    points: list[Point]
    """Results of each workload."""

    comparisons: list[Comparison] = field(default_factory=list)
    """Comparisons with fio."""

    notes: list[str] = field(default_factory=list)
    """Remarks for the reader of the numbers."""

    took_s: float = 0.0
    """Seconds from the start to the end, everything included."""

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values. Later versions only add keys."""
        return {
            "schema": SCHEMA,
            "target": {
                "path": self.places[0],
                "paths": list(self.places),
                "scratch_file": self.made,
                "file_bytes": self.file_bytes,
                "filesystem": self.filesystem,
                "source": self.source,
            },
            "machine": {"kernel": self.kernel, "cores": self.cores},
            "verify": self.verify,
            "took_s": self.took_s,
            "results": [point.to_json() for point in self.points],
            "fio": [comparison.to_json() for comparison in self.comparisons],
            "notes": self.notes,
        }

    def series(self) -> Iterator[tuple[dict[str, Any], Interval]]:
        """Yield each interval of all runs, with columns that name its workload and run."""
        for point in self.points:
            for number, run in enumerate(point.runs):
                names = {**_columns(point.workload), "run": number}
                for interval in run.intervals:
                    yield names, interval

    def write_csv(self, file: TextIO) -> None:
        """Write the summary as CSV: a row for each workload; a mixed one also has one a direction.

        Args:
            file: Text file that was opened with ``newline=""``.
        """
        writer = csv.writer(file, lineterminator="\n")
        for number, point in enumerate(self.points):
            mixed = point.workload.num_reads and point.workload.num_writes
            parts: tuple[Part, ...] = ("total", "reads", "writes") if mixed else ("total",)
            for part in parts:
                rates = point.rates(part)
                row = {
                    **_columns(point.workload),
                    "requests": part,
                    "num_runs": len(rates),
                    **point.summary(part),
                    "lowest_bytes_per_s": min(rates),
                    "highest_bytes_per_s": max(rates),
                    "cpu_cores": point.median("cpu_cores"),
                    "sync_s": point.median("sync_s"),
                    "verdict": point.stability.word,
                    "verdict_reasons": "; ".join(point.stability.reasons),
                }
                if number == 0 and part == "total":
                    writer.writerow(row)
                writer.writerow(row.values())


def _columns(workload: Workload) -> dict[str, Any]:
    """Return the columns that name a workload in a CSV file."""
    names = ("rw", "path", "size", "threads", "depth", "mix", "cache", "staged")
    return {**{name: getattr(workload, name) for name in names}, "depth": workload.in_flight}
