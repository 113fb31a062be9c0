"""Report of `gds bench` as text, in the width of the screen: nothing is cut at 80 columns."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from gds.bench.compare import Comparison
from gds.bench.report import Part, Point, Report
from gds.bench.result import Run
from gds.bench.statistics import WINDOW_ROUNDS, median
from gds.bench.workload import Workload, size_text
from gds.paths import PATHS

if TYPE_CHECKING:
    from rich.console import Console

_GAP: Final = 2
_BAR: Final = 40

Column = tuple[str, str, list[str]]
"""Title of a column, its alignment (``left`` or ``right``), and its cells."""


def show(report: Report, console: Console, *, histograms: bool = False) -> None:
    """Print a report for people, in the width of the console, except for a path that is longer."""
    kind = "scratch file" if report.made else "existing file"
    files = report.points[0].workload.files
    if files > 1:
        kind = f"{files} scratch files"
    beside = f", and {', '.join(report.places[1:])} at the same time" if report.places[1:] else ""
    _say(
        console,
        f"{report.places[0]}: {report.filesystem} on {report.source or 'an unknown source'}, "
        f"{kind} of {size_text(report.file_bytes)}{beside}; kernel {report.kernel}, "
        f"{report.cores} cores",
    )
    varied = _varied(report.points)
    fixed = {name: text for point in report.points for name, text in _settings(point).items()}
    if "page cache" not in varied:
        runs = [run for point in report.points for run in point.runs]
        fixed["page cache"] = state_text(report.points[0].workload, runs)
    _say(
        console,
        ", ".join(f"{name} {text}" for name, text in fixed.items() if name not in varied),
    )
    _say(console, _runs_text(report.points))
    rows = [(point, part) for point in report.points for part in point.rows]
    names = _names(rows, varied)
    console.print()
    _print_columns(console, names, _rates(rows))
    console.print()
    _say(console, "Latency of a request, in milliseconds:")
    _print_columns(console, names, _latencies(rows))
    console.print()
    for point in report.points:
        label, stability = _label(point, varied), point.stability
        if len(report.places) > 1:
            _say(console, ", ".join([*([label] if label else []), *_lanes(report.places, point)]))
        if stability.reasons:
            _say(console, f"{label}: {stability.words}" if label else stability.words)
        if histograms:
            _say(console, f"{label or 'all'}, shares of the requests:")
            _print_histogram(console, point)
    if (
        histograms
        or len(report.places) > 1
        or any(point.stability.reasons for point in report.points)
    ):
        console.print()
    _say(
        console,
        "GB/s: 1e9 bytes per second, syncs not counted; the median of the runs, and their lowest "
        "and highest. CPU: cores in use. sd: standard deviation. max: of all runs; other "
        "latencies: median of the runs. held: share of the file that the page cache had before a "
        "pass."
        + (
            " sync: seconds until all was durable, afterwards."
            if any(point.workload.writes for point in report.points)
            else ""
        ),
    )
    for comparison in report.comparisons:
        _say(console, compared(comparison))
    for note in report.notes:
        _say(console, note)
    _say(console, f"All of it took {report.took_s:.3g} s.")


def state_text(workload: Workload, runs: Sequence[Run]) -> str:
    """Return the page cache's preparation and its largest share of the file before a pass."""
    known = [run.cached_before for run in runs if run.cached_before is not None]
    return f"{workload.cache}, held {max(known):.0%}" if known else f"{workload.cache}, not known"


def compared(comparison: Comparison) -> str:
    """Return a comparison with fio as a line for people."""
    found, workload = comparison.ratio, comparison.workload
    rates = [
        f"{median(samples) / 1e9:.3f} GB/s"
        for samples in (comparison.gds_bytes_per_s, comparison.fio_bytes_per_s)
    ]
    pages = (
        f"{comparison.huge_bytes >> 20} MiB of its memory on huge pages"
        if comparison.huge_bytes
        else "its memory not seen on huge pages"
    )
    ratio = "?" if math.isinf(found.median) else f"{found.median:.2f}"
    return (
        f"fio ({comparison.engine}, {pages}), {workload.rw} {workload.path} "
        f"{size_text(workload.size)}: gds {rates[0]}, fio {rates[1]}, gds / fio {ratio} "
        f"({found.low:.2f} to {found.high:.2f}, 90 %, {len(comparison.fio_bytes_per_s)} "
        f"pairs): {comparison.words}"
    )


def milliseconds(seconds: float) -> str:
    """Return a time in milliseconds as text, with three significant digits from 0.1 ms on."""
    value = seconds * 1e3
    decimals = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:.{decimals}f}"


def _say(console: Console, text: str) -> None:
    """Print a paragraph, broken between words at the width of the console."""
    filled = textwrap.fill(
        text, max(console.width, 20), break_long_words=False, break_on_hyphens=False
    )
    _line(console, filled)


def _line(console: Console, text: str) -> None:
    """Print text as it is."""
    console.print(text.rstrip(), highlight=False, soft_wrap=True, markup=False)


def _settings(point: Point) -> dict[str, str]:
    workload = point.workload
    mixed = workload.reads and workload.writes
    return {
        "rw": workload.rw,
        "size": size_text(workload.size),
        "path": workload.path,
        "threads": str(workload.threads),
        "depth": str(workload.in_flight),
        **({"mix": f"{workload.mix}% reads"} if mixed else {}),
        **({"staged": "yes"} if workload.staged else {}),
        "page cache": state_text(workload, point.runs),
    }


def _varied(points: Sequence[Point]) -> list[str]:
    """Return the names of the settings that differ between workloads.

    The mix differs only between workloads that have one.
    """
    varied = []
    for name in ("rw", "size", "path", "threads", "depth", "mix", "cache"):
        chosen = [p.workload for p in points if name != "mix" or "mix" in _settings(p)]
        if len({getattr(w, "in_flight" if name == "depth" else name) for w in chosen}) > 1:
            varied.append("page cache" if name == "cache" else name)
    return varied


def _lanes(places: Sequence[str], point: Point) -> list[str]:
    return [
        f"{place}: {median([run.lane_bytes_per_s[number] for run in point.counted]) / 1e9:.3f} GB/s"
        for number, place in enumerate(places)
    ]


def _runs_text(points: Sequence[Point]) -> str:
    counts = sorted({len(point.counted) for point in points})
    lengths_s = [run.elapsed_s for point in points for run in point.counted]
    ramped = [p.workload.ramp_s for p in points if any(run.ramp_s for run in p.runs)]
    ramp = f", each after {max(ramped):g} s that do not count" if ramped else ""
    searched = ""
    if any(point.until_steady for point in points):
        searched = f"; of each row the last {WINDOW_ROUNDS} rounds of a search for a steady window"
    span = " to ".join(dict.fromkeys(f"{each:.2g}" for each in (min(lengths_s), max(lengths_s))))
    count = " to ".join(map(str, counts))
    return f"{count} {'run' if count == '1' else 'runs'} a row, of {span} s{ramp}{searched}"


def _label(point: Point, varied: Sequence[str]) -> str:
    """Return the settings of a workload that differ between the workloads, as text."""
    settings = _settings(point)
    return ", ".join(
        settings[name] if name in ("rw", "path") else f"{name} {settings[name]}"
        for name in varied
        if name in settings
    )


def _names(rows: Sequence[tuple[Point, Part]], varied: Sequence[str]) -> list[Column]:
    """Return the columns that name a row: the settings that vary, and the direction."""
    columns: list[Column] = []
    if any(part != "total" for _, part in rows) or "rw" in varied:
        cells = [p.workload.rw if part == "total" else f"- {part}" for p, part in rows]
        columns.append(("rw", "left", cells))
    columns += [
        (name, "left", [_settings(point).get(name, "-") for point, _ in rows])
        for name in varied
        if name != "rw"
    ]
    return columns


def _rates(rows: Sequence[tuple[Point, Part]]) -> list[Column]:
    columns: list[Column] = [
        ("GB/s", "right", [f"{median(p.rates(part)) / 1e9:.3f}" for p, part in rows]),
        (
            "from-to",
            "right",
            [f"{min(p.rates(part)) / 1e9:.3f}-{max(p.rates(part)) / 1e9:.3f}" for p, part in rows],
        ),
        ("IOPS", "right", [f"{p.summary(part)['iops']:.0f}" for p, part in rows]),
        ("CPU", "right", _of_total(rows, lambda p: f"{p.median('cpu_cores'):.2f}")),
    ]
    if any(point.workload.writes for point, _ in rows):
        columns.append(
            (
                "sync s",
                "right",
                _of_total(
                    rows, lambda p: f"{p.median('sync_s'):.3f}" if p.workload.writes else "-"
                ),
            )
        )
    if any(PATHS[point.workload.path].memory == "device" for point, _ in rows):
        columns.append(("PCIe rx", "right", _of_total(rows, lambda p: _link(p, "pcie_rx_gbps"))))
        columns.append(("tx", "right", _of_total(rows, lambda p: _link(p, "pcie_tx_gbps"))))
    columns.append(("verdict", "left", _of_total(rows, lambda p: p.stability.word)))
    return columns


def _latencies(rows: Sequence[tuple[Point, Part]]) -> list[Column]:
    titles = {
        "mean": "mean_s",
        "sd": "stddev_s",
        "p50": "p50_s",
        "p99": "p99_s",
        "p99.9": "p999_s",
        "max": "max_s",
    }
    return [
        (title, "right", [milliseconds(point.latency(name, part)) for point, part in rows])
        for title, name in titles.items()
    ]


def _of_total(rows: Sequence[tuple[Point, Part]], text: Callable[[Point], str]) -> list[str]:
    """Return cells that are empty in the rows of a single direction."""
    return [text(point) if part == "total" else "" for point, part in rows]


def _link(point: Point, name: str) -> str:
    known = [getattr(run, name) for run in point.counted if getattr(run, name) is not None]
    return f"{median(known):.3f}" if known else "-"


def _print_columns(console: Console, names: Sequence[Column], values: Sequence[Column]) -> None:
    """Print a table, in several parts if the console is too narrow for all columns.

    Every part repeats the columns that name a row, or the number of the row if these are wide.
    """
    count = len(values[0][2])
    numbered: Column = ("row", "right", [str(number + 1) for number in range(count)])
    parts: list[list[Column]] = []
    if sum(_width(each) for each in names) > console.width // 2:
        parts += _packed(console.width, [numbered], names)
        names = [numbered]
    parts += _packed(console.width, list(names), values)
    for part in parts:
        for line in range(-2, count):
            cells = [_cell(column, line) for column in part]
            _line(console, (" " * _GAP).join(cells))


def _packed(width: int, names: Sequence[Column], values: Sequence[Column]) -> list[list[Column]]:
    """Divide columns into tables of at most `width` characters, each beginning with `names`."""
    tables = [list(names)]
    for column in values:
        used = sum(_width(each) for each in [*tables[-1], column]) - _GAP
        if used > width and len(tables[-1]) > len(names):
            tables.append(list(names))
        tables[-1].append(column)
    return tables


def _width(column: Column) -> int:
    return max(len(text) for text in (column[0], *column[2])) + _GAP


def _cell(column: Column, line: int) -> str:
    """Return a cell with its padding; line -2 is the title, and line -1 a rule."""
    title, alignment, cells = column
    width = _width(column) - _GAP
    if line == -1:
        return "-" * width
    text = title if line == -2 else cells[line]
    return text.ljust(width) if alignment == "left" else text.rjust(width)


def _print_histogram(console: Console, point: Point) -> None:
    """Print the histogram of the latencies of all runs, with a bar for each doubling."""
    counts: dict[int, int] = {}
    for requests in point.parts("total"):
        for limit_s, count in requests.latency.histogram:
            power = math.ceil(round(math.log2(limit_s / 1e-6), 6))
            counts[power] = counts.get(power, 0) + count
    most, total = max(counts.values()), sum(counts.values())
    for power in range(min(counts), max(counts) + 1):
        count = counts.get(power, 0)
        bar = "#" * math.ceil(_BAR * count / most)
        limit = milliseconds(2.0**power * 1e-6)
        _line(console, f"  <= {limit:>8} ms {count / total:8.3%}  {bar}")
