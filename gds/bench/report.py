"""Report of `gds bench`: results as a table, as JSON, and as a figure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from gds.bench.compare import Comparison
from gds.bench.measure import Run
from gds.bench.statistics import median
from gds.bench.workload import Workload
from gds.errors import RefusedError
from gds.paths import PATHS

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA: Final = 1
"""Version of the JSON form."""

_AXES: Final = ("size", "threads", "depth", "mix", "rw", "path", "cache")
"""Names of the properties of a workload that sweeps can vary."""

_SUMMARY: Final = (
    "bytes_per_s",
    "durable_bytes_per_s",
    "iops",
    "latency_mean_s",
    "latency_p50_s",
    "latency_p99_s",
    "cpu_cores",
    "sync_s",
)


@dataclass(slots=True)
class Point:
    """A workload with the results of its runs."""

    workload: Workload
    """The workload."""

    runs: list[Run] = field(default_factory=list)
    """Results in the order of the runs."""

    def median(self, name: str) -> float:
        """Return the median of a number over all runs; `name` is an attribute of `Run`."""
        return median([getattr(run, name) for run in self.runs])


@dataclass(slots=True)
class Report:
    """All results of one call of `gds bench`."""

    place: str
    """Directory or file that was measured."""

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

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values. Later versions only add keys."""
        return {
            "schema": SCHEMA,
            "target": {
                "path": self.place,
                "scratch_file": self.made,
                "file_bytes": self.file_bytes,
                "filesystem": self.filesystem,
                "source": self.source,
            },
            "machine": {"kernel": self.kernel, "cores": self.cores},
            "verify": self.verify,
            "results": [
                {
                    "workload": dataclasses.asdict(point.workload),
                    "median": {name: point.median(name) for name in _SUMMARY},
                    "runs": [run.to_json() for run in point.runs],
                }
                for point in self.points
            ],
            "fio": [comparison.to_json() for comparison in self.comparisons],
            "notes": self.notes,
        }

    def show(self, console: Console) -> None:
        """Print the report for people."""
        from rich import box
        from rich.table import Table

        kind = "scratch file" if self.made else "existing file, read only"
        console.print(
            f"{self.place}: {self.filesystem} on {self.source or 'an unknown source'}, {kind} of "
            f"{size_text(self.file_bytes)}; kernel {self.kernel}, {self.cores} cores",
            highlight=False,
            soft_wrap=True,
        )
        rows = [_settings(point) for point in self.points]
        varied = [name for name in rows[0] if len({row[name] for row in rows}) > 1]
        same = ", ".join(f"{name} {rows[0][name]}" for name in rows[0] if name not in varied)
        console.print(same, highlight=False, soft_wrap=True)
        table = Table(box=box.SIMPLE_HEAD, show_edge=False)
        for name in varied:
            table.add_column(name, no_wrap=True)
        spread = ["from-to"] if any(len(point.runs) > 1 for point in self.points) else []
        titles = ["GB/s", *spread, "IOPS", "mean ms", "p50 ms", "p99 ms", "CPU", "sync s"]
        link = any(PATHS[point.workload.path].memory == "device" for point in self.points)
        for title in (*titles, *(("PCIe rx", "tx") if link else ())):
            table.add_column(title, justify="right", no_wrap=True)
        for row, point in zip(rows, self.points, strict=True):
            pcie = _link_numbers(point) if link else ()
            table.add_row(*(row[name] for name in varied), *_numbers(point), *pcie)
        console.print(table)
        console.print(
            "GB/s: 1e9 bytes per second, syncs not counted. mean, p50, p99: of a request. CPU: "
            "cores in use. sync: to make it durable, after each pass.",
            highlight=False,
            soft_wrap=True,
        )
        for comparison in self.comparisons:
            console.print(_compared(comparison), highlight=False, soft_wrap=True)
        for note in self.notes:
            console.print(note, highlight=False, soft_wrap=True)


def size_text(nbytes: int) -> str:
    """Return a size as text, such as ``64K`` or ``1M``; a size without such a unit in bytes."""
    for unit, factor in (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)):
        if nbytes >= factor and nbytes % factor == 0:
            return f"{nbytes // factor}{unit}"
    return str(nbytes)


def state_text(workload: Workload, runs: Sequence[Run]) -> str:
    """Return the state of the page cache as text: its preparation, and its share of the file.

    The share is the largest that the page cache held before a pass.
    """
    known = [run.cached_before for run in runs if run.cached_before is not None]
    return f"{workload.cache}, held {max(known):.0%}" if known else f"{workload.cache}, not known"


def plot_axis(workloads: Sequence[Workload]) -> str:
    """Return the property for the x axis of a figure: the first numeric one that differs.

    Raises:
        RefusedError: No numeric property differs between the workloads.
    """
    for name in ("size", "threads", "depth", "mix"):
        if len({getattr(workload, name) for workload in workloads}) > 1:
            return name
    raise RefusedError("--plot needs --sweep of size, threads, depth or mix")


def plot(report: Report, path: str) -> None:
    """Draw the rates in GB/s over the first numeric property that was swept, into a file.

    The figure has one line for each combination of the other properties that were swept.

    Args:
        report: Results to draw.
        path: Path of the file; its extension gives the format.

    Raises:
        RefusedError: matplotlib is not installed, or no numeric property was swept.
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
    """Return an empty figure of matplotlib and its axes; no window is opened.

    Raises:
        RefusedError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RefusedError(
            "--plot needs matplotlib: pip install matplotlib (or '.[bench]' in a checkout)"
        ) from error
    figure = Figure(figsize=(7, 4), layout="constrained")
    return figure, figure.subplots()


def _settings(point: Point) -> dict[str, str]:
    """Return the settings of a workload as text, by name."""
    workload = point.workload
    rw: str = workload.rw
    if workload.reads and workload.writes:
        rw += f" ({workload.mix} % reads)"
    return {
        "rw": rw,
        "path": workload.path,
        "size": size_text(workload.size),
        "threads": str(workload.threads),
        "depth": str(workload.in_flight),
        "page cache": state_text(workload, point.runs),
    }


def _numbers(point: Point) -> Sequence[str]:
    """Return the results of a workload as the cells of a table's row."""
    rates = [run.bytes_per_s / 1e9 for run in point.runs]
    spread = [f"{min(rates):.3f}-{max(rates):.3f}"] if len(rates) > 1 else []
    latencies = (point.median(f"latency_{name}_s") for name in ("mean", "p50", "p99"))
    return (
        f"{median(rates):.3f}",
        *spread,
        f"{point.median('iops'):.0f}",
        *(f"{seconds * 1e3:.3f}" for seconds in latencies),
        f"{point.median('cpu_cores'):.2f}",
        f"{point.median('sync_s'):.3f}" if point.workload.writes else "-",
    )


def _link_numbers(point: Point) -> tuple[str, ...]:
    """Return the traffic over the GPU's link, received and sent, in GB/s as text."""
    found = []
    for name in ("pcie_rx_gbps", "pcie_tx_gbps"):
        known = [getattr(run, name) for run in point.runs if getattr(run, name) is not None]
        found.append(f"{median(known):.3f}" if known else "-")
    return tuple(found)


def _compared(comparison: Comparison) -> str:
    """Return a comparison with fio as a line for people."""
    verdict, workload = comparison.verdict, comparison.workload
    rates = [
        f"{median(samples) / 1e9:.3f} GB/s"
        for samples in (comparison.gds_bytes_per_s, comparison.fio_bytes_per_s)
    ]
    pages = (
        f"{comparison.huge_bytes >> 20} MiB of its memory on huge pages"
        if comparison.huge_bytes
        else "its memory not seen on huge pages"
    )
    ratio = "?" if math.isinf(verdict.median) else f"{verdict.median:.2f}"
    return (
        f"fio ({comparison.engine}, {pages}), {workload.rw} {workload.path} "
        f"{size_text(workload.size)}: gds {rates[0]}, fio {rates[1]}, ratio {ratio} "
        f"({verdict.low:.2f} to {verdict.high:.2f}, 90 %, {len(comparison.fio_bytes_per_s)} "
        f"pairs): {comparison.words}"
    )


def _value(workload: Workload, name: str) -> str:
    """Return a property of a workload as text."""
    value = getattr(workload, name)
    return size_text(value) if name == "size" else str(value)
