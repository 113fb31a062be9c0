"""Commands ``offload ls`` and ``offload show``: what a store has, and what is in a checkpoint.

The table of ``ls`` has one line for each checkpoint, at any width of the terminal.
"""

from __future__ import annotations

import dataclasses
import math
import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offload.cli.options import (
    CHECKPOINT_COLUMNS,
    CheckpointPath,
    Json,
    Parts,
    StorePath,
    cell,
    make_console,
    moment,
    one_line,
    print_checkpoints,
    print_json,
)
from offload.cli.tiers import list_url, show_decisions
from offload.format.metrics import describes_the_run
from offload.near.place import is_remote
from offload.tiers.services.address import is_tier_url
from offload.units import grouped, listed, size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.text import Text

    from offload.checkpoint.listing import CheckpointInfo
    from offload.checkpoint.overview import Overview

_SHORTEST_PIN = 5
"""Least number of characters to which the name of a pin is cut, so that a metric fits beside it."""

_NOTES = "pins, metrics"
"""Head of the last column. The column is left out if its head does not fit."""

_LONGEST_LINE = 10_000
"""Width of the table with ``--wide``, in characters; more than 16 metrics with their names need."""

_ELLIPSIS = "…"

_GAP = "  "
"""Space between columns of the table."""


def ls(
    store: StorePath,
    part: Parts = None,
    wide: Annotated[
        bool, typer.Option("--wide", help="Show all pins and metrics, however long the lines are.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List the checkpoints of a store.

    Each checkpoint has one line, with as many of its pins and metrics as fit. If training uploads
    to a tier, its last decisions follow, with their reasons.

    Checkpoints that are not usable are listed with the reason. Only names, sizes and manifests are
    read; verify reads the content. The URL of a tier (s3://bucket/folder) lists the copies in it,
    and that of a run on a server (offload+unix:///path/of/socket/run) what the server has of it.
    """
    if is_tier_url(store) and not is_remote(store):
        list_url(store, as_json=as_json)
        return
    if is_remote(store):
        from offload.near.reading import overview as overview_there

        _refuse_parts(part)
        found = overview_there(store)
    else:
        from offload.checkpoint.overview import overview

        found = overview(store, part or None)
    if as_json:
        print_json([dataclasses.asdict(info) for info in found.checkpoints])
    else:
        _show_list(store, found, wide=wide)
        for path in found.unnamed_parts:
            typer.echo(
                f"{one_line(path)}: named by no checkpoint; the next run of several ranks, or "
                "`offload prune`, removes it"
            )
        if not is_remote(store):
            show_decisions(store)
    for text in found.lost_pins:
        typer.secho(one_line(text), fg="red", err=True)


def show(
    checkpoint: CheckpointPath,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    part: Parts = None,
    as_json: Json = False,
) -> None:
    """Describe a checkpoint: its optimizer, files and tensors."""
    if is_remote(checkpoint):
        from offload.near.reading import describe as describe_there

        _refuse_parts(part)
        description = describe_there(checkpoint)
    else:
        from offload.checkpoint.opening import open_checkpoint
        from offload.checkpoint.overview import describe

        with open_checkpoint(checkpoint, parts=part or None) as opened:
            description = describe(opened)
    if as_json:
        groups = description["hyperparameters"]
        description["hyperparameters"] = _as_json(groups)
        print_json(description)
    else:
        _show_description(description, tensors=tensors)


def _refuse_parts(parts: list[str] | None) -> None:
    if parts:
        raise typer.BadParameter("a server has no --part: it knows its drives")


def _show_description(description: dict[str, Any], *, tensors: bool) -> None:
    from rich.table import Table

    console = make_console()
    table = Table(show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    for key in ("path", "step", "generation", "created", "optimizer"):
        table.add_row(key, cell(description[key]))
    if description["update_code"]:
        table.add_row("updated by", cell(description["update_code"]))
    if description["parameters_only"]:
        table.add_row("state", "parameters only: restore() does not continue from it")
    for index, part in enumerate(description["parts"], 1):
        table.add_row(f"on drive {index}", cell(part))
    for one in description["owners"]:
        where = "" if one["seen"] else ", not seen here"
        table.add_row(f"owner {one['owner']}{where}", cell(one["path"]))
    for name, value in description["metrics"].items():
        table.add_row(cell(f"metric {name}"), f"{value:g}")
    table.add_row("parameters", f"{description['num_parameters']:,}")
    for index, group in enumerate(description["hyperparameters"]):
        values = ", ".join(f"{name}={value}" for name, value in group.items())
        table.add_row(f"group {index}", cell(values))
    for name, num_bytes in description["state_arrays"].items():
        table.add_row(cell(f"state array {name}"), size(num_bytes))
    for name, num_bytes in description["files"].items():
        table.add_row(cell(name), size(num_bytes))
    console.print(table)
    if tensors:
        for entry in description["tensors"]:
            name = one_line(entry["name"])
            typer.echo(f"{entry['dtype']:>5} {entry['shape']!s:<20} {name}")


def _as_json(value: Any) -> Any:
    """Return hyper-parameters as JSON values: lists, numbers, and text for non-finite numbers."""
    if isinstance(value, dict):
        return {key: _as_json(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(one) for one in value]
    if hasattr(value, "item"):  # a tensor of one element
        value = value.item()
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def _show_list(store: str, seen: Overview, *, wide: bool) -> None:
    """Print the table, what its words mean, and why checkpoints are not usable."""
    found = seen.checkpoints
    if not found:
        where = "; list the first directory of the store, which this one belongs to"
        typer.echo(f"{store}: no checkpoints{where if seen.is_further else ''}")
        return
    _show_table(found, wide=wide)
    if any(info.valid and not info.parameters_only for info in found):
        typer.echo(
            "complete: every file is there; its content is not read "
            f"(offload verify {one_line(store)})"
        )
    if any(info.parameters_only for info in found):
        typer.echo("parameters only: can be opened and exported; training cannot go on from it")
    not_seen: dict[str, list[str]] = {}
    for path in dict.fromkeys(path for info in found for path in info.not_seen):
        not_seen.setdefault(os.path.dirname(path), []).append(path)
    for paths in not_seen.values():
        typer.echo(f"not seen here, so not counted: {one_line(listed(paths))}")
    for text in grouped([(info.path, info.reason) for info in found if not info.valid]):
        typer.secho(one_line(text), fg="red")


def _fit_notes(pins: Sequence[str], metrics: Mapping[str, float], room: int) -> str:
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


def _show_table(found: Sequence[CheckpointInfo], *, wide: bool) -> None:
    from rich.cells import cell_len

    width = _LONGEST_LINE if wide else make_console().width
    rows = [_first_cells(info) for info in found]
    head = ""
    if any(info.pins or info.metrics for info in found):
        widths = [
            max(cell_len(header), *(text.cell_len for text in column))
            for header, column in zip(CHECKPOINT_COLUMNS, zip(*rows, strict=True), strict=True)
        ]
        room = width - sum(widths) - len(_GAP) * len(widths)
        if room >= len(_NOTES):
            head = _NOTES
            for info, row in zip(found, rows, strict=True):
                pins = [one_line(pin) for pin in info.pins]
                metrics = {one_line(name): value for name, value in info.metrics.items()}
                row.append(cell(_fit_notes(pins, metrics, room)))
    print_checkpoints(rows, head, width=width)


def _first_cells(info: CheckpointInfo) -> list[Text]:
    from rich.text import Text

    name = cell(os.path.basename(info.path))
    if not info.valid:
        return [name, cell("-"), cell("-"), Text("not usable", style="red")]
    what = Text("parameters only") if info.parameters_only else Text("complete", style="green")
    return [name, moment(info.created), cell(size(info.bytes)), what]
