"""The page of a report. All text from a store is escaped here, and the page loads nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from statistics import median

from offload.report.charts import Chart, Column
from offload.report.findings import what_would_help, where_the_time_went
from offload.report.history import Stretch
from offload.report.phases import REST, TITLES, phases_of, title_of
from offload.report.run import Entry, Run, merged
from offload.report.style import STYLE
from offload.units import duration, many, rate, size

_MAX_COLUMNS = 340
"""Largest number of stretches of steps that are drawn: two points of the screen for each."""

_MAX_ROWS = 200
_MAX_RECORDS = 1000
_MAX_RESUMES = 50
_MAX_METRIC_COLUMNS = 3

_NO_METRICS = (
    "No checkpoint has metrics. Give them to the checkpoints to see them here: "
    '<code>optimizer.checkpoint(state, metrics={"loss": loss.item()})</code>.'
)


def render(run: Run) -> str:
    """Return the report as one HTML document: some 200 KB, and a few MB for any file.

    Its text is plain ASCII or valid Unicode, so that it can be encoded in UTF-8.
    """
    stretches = merged(run.history.stretches, _MAX_COLUMNS)
    name = _text(os.path.basename(run.store) or run.store)
    sections = [_metrics(run)]
    if run.totals.step_s:
        sections += [_step_time(run, stretches), _rates(run, stretches)]
    sections.append(_checkpoints(run))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Run {name}</title>
<style>{STYLE}</style>
</head>
<body>
<header>
<h1>Run {name}</h1>
<p class="muted">{_subtitle(run)}</p>
</header>
<main>
{_findings(run)}
{_figures(run)}
{"".join(sections)}
</main>
<footer>{_notes(run)}</footer>
<script type="application/json" id="run">{_data(run, stretches)}</script>
</body>
</html>
"""


def _subtitle(run: Run) -> str:
    first, last = run.steps
    times = [entry.at for entry in run.entries if entry.at]
    times += [one.at for one in run.history.stretches]
    when = ""
    if times:
        begun, ended = _moment(min(times)), _moment(max(times))
        when = f", at {begun} UTC" if begun == ended else f", from {begun} to {ended} UTC"
    return f"{_text(run.store)}: steps {first:,} to {last:,}{when}"


def _findings(run: Run) -> str:
    advice = "".join(f"<li>{_text(text)}</li>" for text in what_would_help(run))
    help_list = f"<p><b>What would make it faster</b></p><ul>{advice}</ul>" if advice else ""
    return (
        '<section class="found"><p><b>Where the time went</b></p>'
        f"<p>{_text(where_the_time_went(run))}</p>{help_list}</section>"
    )


def _figures(run: Run) -> str:
    totals, seals = run.totals, run.history.seals
    kept = [entry for entry in run.entries if entry.kept and entry.kept.valid]
    figures = [("checkpoints made", f"{len(run.entries):,}"), ("kept", f"{len(kept):,}")]
    if kept:
        figures.append(("newest checkpoint", size(kept[-1].kept.bytes if kept[-1].kept else 0)))
    if seals:
        stall = median(seal.stall_s for seal in seals)
        figures.append(("training waited for a checkpoint, median", duration(stall)))
    if totals.num_steps:
        figures.insert(0, ("a step, on average", duration(totals.step_s / totals.num_steps)))
        figures.insert(0, ("steps recorded", f"{totals.num_steps:,}"))
        figures += [("read", size(totals.read_bytes)), ("written", size(totals.written_bytes))]
    cells = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in figures)
    return f"<dl>{cells}</dl>"


def _metrics(run: Run) -> str:
    charts = []
    for number, name in enumerate(run.metrics):
        points = [(e.step, e.metrics[name]) for e in run.entries if name in e.metrics]
        values = [value for _, value in points]
        chart = Chart(
            f"{_plain(name)} of the checkpoints",
            run.steps,
            (min(values), max(values)),
            resumed_at=_resumes(run),
        )
        chart.curve(points, f"c{number % 8}")
        charts.append(_figure(f"<b>{_text(name)}</b>, last {values[-1]:g}", chart))
    return f"<section><h2>Metrics of the checkpoints</h2>{''.join(charts) or _NO_METRICS}</section>"


def _step_time(run: Run, stretches: Sequence[Stretch]) -> str:
    phases = list(phases_of(run.totals.seconds))
    each = [
        {name: value / one.num_steps for name, value in phases_of(one.seconds).items()}
        for one in stretches
    ]
    highest = max((sum(seconds.values()) for seconds in each), default=0.0)
    unit, factor = next(
        ((u, f) for u, f in (("s", 1.0), ("ms", 1e3)) if highest * f >= 1), ("us", 1e6)
    )
    columns = [
        Column(one.start, one.step, _values(phases, seconds, factor), _title(one, seconds))
        for one, seconds in zip(stretches, each, strict=True)
    ]
    chart = Chart(
        "Time of a step by phase",
        run.steps,
        (0.0, highest * factor * 1.05),
        unit,
        _resumes(run),
    )
    classes = [_class(name, phases) for name in phases]
    chart.stack(columns, classes)
    shares = run.totals.shares
    keys = [
        (name, f"{_text(title_of(phase))} {shares[phase]:.0%}")
        for name, phase in zip(classes, phases, strict=True)
    ]
    beside = ", beside the model" if run.totals.is_beside else ""
    return f"<section><h2>Time of a step{beside}</h2>{_figure(_keys(keys), chart)}</section>"


def _values(phases: Sequence[str], seconds: Mapping[str, float], factor: float) -> list[float]:
    """Return values in the order of the phases; those that are not among them are the rest."""
    values = [seconds.get(name, 0.0) * factor for name in phases]
    values[-1] += sum(seconds[name] for name in seconds if name not in phases) * factor
    return values


def _title(one: Stretch, seconds: Mapping[str, float]) -> str:
    parts = [f"{_plain(title_of(name))} {duration(value)}" for name, value in seconds.items()]
    total = duration(sum(seconds.values()))
    return "\n".join([f"steps {one.start + 1:,} to {one.step:,}: {total} each", *parts])


def _rates(run: Run, stretches: Sequence[Stretch]) -> str:
    pairs = [
        (
            _rate(one.read_bytes, one.seconds.get("read"), one),
            _rate(one.written_bytes, one.seconds.get("write"), one),
        )
        for one in stretches
    ]
    highest = max((max(pair) for pair in pairs), default=0.0)
    unit, factor = ("GB/s", 1e-9) if highest >= 1e8 else ("MB/s", 1e-6)
    columns = [
        Column(
            one.start,
            one.step,
            (reading * factor, writing * factor),
            f"steps {one.start + 1:,} to {one.step:,}: read {rate(reading)}, written "
            f"{rate(writing)}",
        )
        for one, (reading, writing) in zip(stretches, pairs, strict=True)
    ]
    chart = Chart(
        "Rates of reading and writing",
        run.steps,
        (0.0, highest * factor * 1.05),
        unit,
        _resumes(run),
    )
    chart.stairs(columns, ("c0", "c1"))
    keys = _keys([("c0", "read"), ("c1", "written")])
    what = "bytes divided by the time in which the drives were busy"
    if not any("read" in one.seconds for one in stretches):
        what = "bytes divided by the time of the steps"
    return f"<section><h2>Rates</h2>{_figure(f'{keys}{what}', chart)}</section>"


def _rate(num_bytes: float, busy_s: float | None, one: Stretch) -> float:
    seconds = sum(phases_of(one.seconds).values()) if busy_s is None else busy_s
    return num_bytes / seconds if seconds > 1e-6 else 0.0


def _checkpoints(run: Run) -> str:
    kept = [entry for entry in run.entries if entry.kept]
    gone = [entry for entry in run.entries if not entry.kept]
    room = max(_MAX_ROWS - len(kept), 0)
    shown = [*kept[-_MAX_ROWS:], *gone[max(len(gone) - room, 0) :]]
    shown.sort(key=lambda entry: -entry.step)
    names = run.metrics[:_MAX_METRIC_COLUMNS]
    heads = ["step", "sealed (UTC)", "in the store", "size"]
    heads += ["written", "training waited", "seal took"] if run.history.seals else []
    heads += map(_text, names)
    has_seals = bool(run.history.seals)
    rows = "".join(f"<tr>{_row(entry, names, has_seals=has_seals)}</tr>" for entry in shown)
    left_out = len(run.entries) - len(shown)
    more = (
        f'<p class="muted">{many(left_out, "more checkpoint")} not shown.</p>' if left_out else ""
    )
    head = "".join(f'<th scope="col">{text}</th>' for text in heads)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    body = f'<div class="table">{table}</div>{more}' if shown else "<p>There are none.</p>"
    return f"<section><h2>Checkpoints, newest first</h2>{body}</section>"


def _row(entry: Entry, names: Sequence[str], *, has_seals: bool) -> str:
    seal, kept = entry.seal, entry.kept
    state = ("complete" if kept.valid else "not usable") if kept else "recycled"
    pins = f", pinned: {', '.join(kept.pins)}" if kept and kept.pins else ""
    cells = [
        f"<td>{entry.step:,}</td>",
        f"<td>{_moment(entry.at) if entry.at else ''}</td>",
        f"<td{'' if kept else ' class=gone'}>{state}{_text(pins)}</td>",
        f"<td>{size(kept.bytes) if kept and kept.valid else ''}</td>",
    ]
    if has_seals:
        cells += [
            f"<td>{size(seal.bytes_written) if seal else ''}</td>",
            f"<td>{duration(seal.stall_s) if seal else ''}</td>",
            f"<td>{duration(seal.seal_s) if seal else ''}</td>",
        ]
    values = (entry.metrics.get(name) for name in names)
    cells += [f"<td>{'' if value is None else f'{value:.5g}'}</td>" for value in values]
    return "".join(cells)


def _notes(run: Run) -> str:
    history = run.history
    notes = [
        f"Made by <code>offload report</code> at {_moment(datetime.now(UTC).timestamp())} UTC."
    ]
    if resumes := [f"{step:,}" for step in _resumes(run)]:
        notes.append(
            f"Dashed lines: later processes went on from step {', '.join(resumes)}. Steps that "
            "they took again are counted once."
        )
    if history.num_unreadable:
        lines = many(history.num_unreadable, "line")
        notes.append(f"{lines} of history.jsonl could not be understood and had to be left out.")
    notes += [
        _text(entry.kept.reason[:300])
        for entry in run.entries[-_MAX_ROWS:]
        if entry.kept and not entry.kept.valid
    ]
    return "".join(f"<p>{note}</p>" for note in notes)


def _data(run: Run, stretches: Sequence[Stretch]) -> str:
    """Return the numbers that are drawn as JSON, for those who want to draw them otherwise."""
    names = run.metrics
    every = -(-len(run.entries) // _MAX_RECORDS) or 1
    value = {
        "steps": [
            {
                "start": one.start,
                "step": one.step,
                "steps": one.num_steps,
                "seconds": {_plain(name): seconds for name, seconds in one.seconds.items()},
                "read_bytes": one.read_bytes,
                "written_bytes": one.written_bytes,
            }
            for one in stretches
        ],
        "checkpoints": [
            {
                "step": entry.step,
                "at": entry.at,
                "kept": entry.kept is not None,
                "bytes": entry.kept.bytes if entry.kept else None,
                "stall_s": entry.seal.stall_s if entry.seal else None,
                "seal_s": entry.seal.seal_s if entry.seal else None,
                "metrics": {_plain(n): entry.metrics[n] for n in names if n in entry.metrics},
            }
            for entry in run.entries[::-every][::-1]
        ],
        "resumed_at": _resumes(run),
    }
    # A tag in a name must not end the element.
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _resumes(run: Run) -> list[int]:
    return run.history.resumed_at[-_MAX_RESUMES:]


def _figure(caption: str, chart: Chart) -> str:
    return (
        f'<figure><figcaption>{caption}</figcaption><div class="plot">{chart.svg()}</div></figure>'
    )


def _keys(keys: Sequence[tuple[str, str]]) -> str:
    items = "".join(f'<span><i class="{name}"></i>{text}</span>' for name, text in keys)
    return f'<div class="keys">{items}</div>'


def _class(phase: str, phases: Sequence[str]) -> str:
    """Return the class of a phase's colour, which is the same in every report."""
    if phase == REST:
        return "c7"
    known = list(TITLES)
    others = [name for name in phases if name not in known]
    return f"c{known.index(phase) if phase in known else len(known) + others.index(phase)}"


def _moment(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M")


def _plain(text: str) -> str:
    """Return text without characters that change how other text is shown, or are none."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def _text(text: str) -> str:
    return escape(_plain(text))
