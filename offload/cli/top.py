"""Command ``offload top``: what a run is doing, beside it or afterwards.

It reads ``status.json`` and nothing else, so it may be called as often as somebody likes.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Annotated

import typer

from gds.errors import message_of
from offload.cli.options import make_console, one_line
from offload.cli.top_lines import Row, plain, rows
from offload.errors import StoreError
from offload.record.status import read_status

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_PLAIN_COLUMNS = 80


def top(
    store: Annotated[str, typer.Argument(help="Directory of a store.")],
    once: Annotated[
        bool,
        typer.Option("--once", help="Print one table as plain text, COLUMNS or 80 columns wide."),
    ] = False,
    prometheus: Annotated[
        bool, typer.Option("--prometheus", help="Print metrics in the text format of Prometheus.")
    ] = False,
) -> None:
    """Watch a run: its steps, what they wait for, drives, checkpoints and uploads.

    The view is drawn anew each second, until Ctrl-C. Where the output is no terminal, it is
    printed once, as with --once. A run that has ended, or was killed, says since when.
    """
    directory = os.path.abspath(store)
    status, now = read_status(directory), time.time()
    if prometheus:
        from offload.cli.prometheus import exposition

        typer.echo(exposition(directory, status, now), nl=False)
        return
    console = make_console()
    if once or not console.is_terminal:
        typer.echo(plain(rows(one_line(directory), status, now), _columns()))
        return
    try:
        _follow(directory, console)
    except KeyboardInterrupt:
        return


def _columns() -> int:
    """Return the width of plain text, which does not depend on where it goes."""
    text = os.environ.get("COLUMNS", "")
    return max(int(text), 20) if text.isascii() and text.isdigit() else _PLAIN_COLUMNS


def _follow(directory: str, console: Console) -> None:
    from rich.live import Live

    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(_view(directory), refresh=True)
            time.sleep(1.0)


def _view(directory: str) -> RenderableType:
    """Return the present view, or why there is none at the moment."""
    from rich.table import Table
    from rich.text import Text

    now = time.time()
    try:
        found = [*rows(one_line(directory), read_status(directory), now)]
    except StoreError as error:
        found = [Row("state", one_line(message_of(error)), "red")]
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis")
    for row in found:
        table.add_row(row.label, Text(row.text, style=row.style))
    return table
