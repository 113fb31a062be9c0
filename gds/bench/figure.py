"""Figure of a sweep, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from gds.bench.report import Point, Report
from gds.bench.workload import Workload, size_text
from gds.errors import RefusedError

_AXES: Final = ("size", "threads", "depth", "mix", "rw", "path", "cache")
"""Names of the properties of a workload that sweeps can vary."""


def plot_axis(workloads: Sequence[Workload]) -> str:
    """Return the property for the x axis of a figure: the first numeric one that differs."""
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
    """Return a property of a workload as text."""
    value = getattr(workload, name)
    return size_text(value) if name == "size" else str(value)
