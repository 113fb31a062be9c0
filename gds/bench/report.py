"""Report of `gds bench`: results of every workload, with a verdict, as JSON, CSV and figure."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TextIO

from gds.bench.compare import Comparison
from gds.bench.result import Interval, Requests, Run, whole_rates
from gds.bench.statistics import WINDOW_ROUNDS, Stability, assess, median, window_is_steady
from gds.bench.workload import Workload, size_text
from gds.errors import RefusedError

SCHEMA: Final = 1
Part = Literal["total", "reads", "writes"]

LATENCIES: Final = ("mean_s", "stddev_s", "p50_s", "p99_s", "p999_s", "max_s")


@dataclass(slots=True)
class Point:
    """A workload with the results of its runs."""

    workload: Workload
    runs: list[Run] = field(default_factory=list)
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

    @property
    def rows(self) -> tuple[Part, ...]:
        """Rows to show: of all requests, and of each direction if there are both."""
        mixed = self.workload.num_reads and self.workload.num_writes
        return ("total", "reads", "writes") if mixed else ("total",)

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
        mixed = len(self.rows) > 1
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
    filesystem: str
    source: str
    kernel: str
    cores: int
    verify: bool
    points: list[Point]
    comparisons: list[Comparison] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    took_s: float = 0.0

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
        """Write the rows of the summary as CSV, to a file that was opened with ``newline=""``."""
        writer = csv.writer(file, lineterminator="\n")
        for number, point in enumerate(self.points):
            for part in point.rows:
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


_AXES: Final = ("size", "threads", "depth", "mix", "rw", "path", "cache")


def plot_axis(workloads: Sequence[Workload]) -> str:
    """Return the property for the x axis of a figure: the first numeric one that differs."""
    for name in ("size", "threads", "depth", "mix"):
        if len({getattr(workload, name) for workload in workloads}) > 1:
            return name
    raise RefusedError("--plot needs --sweep of size, threads, depth or mix")


def plot(report: Report, path: str) -> None:
    """Draw the rates in GB/s over the first numeric property that was swept, into a file.

    The figure has one line for each combination of the other properties that were swept. The
    extension of the path gives the format.
    """
    workloads = [point.workload for point in report.points]
    axis = plot_axis(workloads)
    figure, axes = new_figure()
    rest = [
        name
        for name in _AXES
        if name != axis and len({getattr(workload, name) for workload in workloads}) > 1
    ]
    lines: dict[str, list[Point]] = {}
    for point in report.points:
        label = ", ".join(f"{name} {_value(point.workload, name)}" for name in rest)
        lines.setdefault(label, []).append(point)
    for label, points in lines.items():
        points.sort(key=lambda point: getattr(point.workload, axis))
        values = [getattr(point.workload, axis) for point in points]
        rates = [point.median("bytes_per_s") / 1e9 for point in points]
        axes.plot(values, rates, marker="o", label=label or report.points[0].workload.rw)
    ticks = sorted({getattr(point.workload, axis) for point in report.points})
    if axis != "mix":
        axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [size_text(tick) if axis == "size" else str(tick) for tick in ticks])
    axes.set_xlabel(axis)
    axes.set_ylabel("GB/s")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path)


def new_figure() -> tuple[Any, Any]:
    """Return an empty figure of matplotlib and its axes; no window is opened."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RefusedError(
            "--plot needs matplotlib: pip install matplotlib (or '.[bench]' in a checkout)"
        ) from error
    figure = Figure(figsize=(7, 4), layout="constrained")
    return figure, figure.subplots()


def _value(workload: Workload, name: str) -> str:
    value = getattr(workload, name)
    return size_text(value) if name == "size" else str(value)
