"""The table of ``offload ls``: one line for each checkpoint, at any width of the terminal."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import typer

from offload.cli.options import cell, make_console, one_line
from offload.format.metrics import describes_the_run
from offload.format.names import part_number
from offload.units import grouped, listed, size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.text import Text

    from offload.checkpoint.listing import CheckpointInfo

_SHORTEST_PIN = 5
"""Least number of characters to which the name of a pin is cut, so that a metric fits beside it."""

_NOTES = "pins, metrics"
"""Head of the last column. The column is left out if its head does not fit."""

_LONGEST_LINE = 10_000
"""Width of the table with ``--wide``, in characters; more than 16 metrics with their names need."""

_ELLIPSIS = "…"

_GAP = "  "
"""Space between columns of the table."""


def show_list(store: str, found: list[CheckpointInfo], *, wide: bool) -> None:
    """Print the table, what its words mean, and why checkpoints are not usable."""
    if not found:
        further = any(part_number(name) is not None for name in os.listdir(store))
        where = "; list the first directory of the store, which this one belongs to"
        typer.echo(f"{store}: no checkpoints{where if further else ''}")
        return
    _show_table(found, wide=wide)
    if any(info.valid for info in found):
        typer.echo(
            "complete: every file is there; its content is not read "
            f"(offload verify {one_line(store)})"
        )
    not_seen: dict[str, list[str]] = {}
    for path in dict.fromkeys(path for info in found for path in info.not_seen):
        not_seen.setdefault(os.path.dirname(path), []).append(path)
    for paths in not_seen.values():
        typer.echo(f"not seen here, so not counted: {one_line(listed(paths))}")
    for text in grouped([(info.path, info.reason) for info in found if not info.valid]):
        typer.secho(one_line(text), fg="red")


def show_unnamed(paths: Sequence[str]) -> None:
    """Print parts of owners that no checkpoint names, and that take space."""
    for path in paths:
        typer.echo(
            f"{one_line(path)}: named by no checkpoint; the next run of several ranks, or `offload "
            "prune`, removes it"
        )


def fit_notes(pins: Sequence[str], metrics: Mapping[str, float], room: int) -> str:
    """Return pins and metrics as one line: all of them, or those that matter most.

    If not all of them fit, the first pin and the first metric of the model come first. The name of
    the pin is cut in the middle if that makes room for the metric, and metrics have four digits.
    The line ends with the number of pins and metrics that were left out, such as ``+3``.
    """
    everything = ", ".join([*pins, *(f"{name}={value:g}" for name, value in metrics.items())])
    if len(everything) <= room:
        return everything
    measured = sorted(metrics, key=describes_the_run)  # metrics of the model first
    texts = [f"{name}={metrics[name]:.4g}" for name in measured]
    notes = [*pins[:1], *texts[:1], *pins[1:], *texts[1:]]
    for shown in range(len(notes), 0, -1):
        if len(text := _some_of(notes, shown)) <= room:
            return text
        if shown == 2 and pins:
            pin_room = room - (len(text) - len(pins[0]))
            if pin_room >= _SHORTEST_PIN:
                return _some_of([_cut_middle(pins[0], pin_room), *notes[1:]], shown)
    left_out = f" +{len(notes) - 1}" if len(notes) > 1 else ""
    return _cut_middle(notes[0], room - len(left_out)) + left_out


def _some_of(notes: Sequence[str], shown: int) -> str:
    hidden = len(notes) - shown
    return ", ".join(notes[:shown]) + (f" +{hidden}" if hidden else "")


def _cut_middle(text: str, room: int) -> str:
    """Return the text with an ellipsis in its middle if it has more than `room` characters."""
    if len(text) <= room:
        return text
    kept = room - len(_ELLIPSIS)
    head = kept // 2
    return text[:head] + _ELLIPSIS + text[len(text) - (kept - head) :]


def _show_table(found: list[CheckpointInfo], *, wide: bool) -> None:
    from rich import box
    from rich.cells import cell_len
    from rich.table import Table

    console = make_console(width=_LONGEST_LINE) if wide else make_console()
    rows = [_first_cells(info) for info in found]
    headers = ["checkpoint", "created", "size", "state"]
    if any(info.pins or info.metrics for info in found):
        widths = [
            max(cell_len(header), *(text.cell_len for text in column))
            for header, column in zip(headers, zip(*rows, strict=True), strict=True)
        ]
        room = console.width - sum(widths) - len(_GAP) * len(widths)
        if room >= len(_NOTES):
            headers.append(_NOTES)
            for info, row in zip(found, rows, strict=True):
                row.append(_notes_cell(info, room))
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    for header in headers:
        table.add_column(header, no_wrap=True, justify="right" if header == "size" else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _notes_cell(info: CheckpointInfo, room: int) -> Text:
    pins = [one_line(pin) for pin in info.pins]
    metrics = {one_line(name): value for name, value in info.metrics.items()}
    return cell(fit_notes(pins, metrics, room))


def _first_cells(info: CheckpointInfo) -> list[Text]:
    from rich.text import Text

    name = cell(os.path.basename(info.path))
    if not info.valid:
        return [name, cell("-"), cell("-"), Text("not usable", style="red")]
    created = cell(info.created[:16].replace("T", " "))
    return [name, created, cell(size(info.bytes)), Text("complete", style="green")]
