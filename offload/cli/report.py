"""Command ``offload report``: one HTML file about a run, made from what its store has."""

from __future__ import annotations

import errno
import os
from typing import Annotated

import typer

from offload.cli.options import Parts, one_line
from offload.errors import StoreError
from offload.units import many


def report(
    store: Annotated[str, typer.Argument(help="First directory of a store.")],
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", help="File to write. [default: STORE-report.html, here]"),
    ] = None,
    part: Parts = None,
) -> None:
    """Write one HTML file about a run: losses, time of steps, rates and checkpoints.

    It says where the time went, and what would make the run faster. The file needs no server and no
    network. A file of that name is replaced. The store may be in use.
    """
    from offload.report import look_back, render

    run = look_back(store, parts=part or None)
    name = os.path.basename(run.store) or "store"
    path = output if output is not None else f"{name}-report.html"
    _refuse_in_store(path, run.store)
    page = render(run)
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(page)
    except OSError as error:
        why = error.strerror or "it cannot be written"
        raise StoreError(
            error.errno or errno.EIO, f"no report was written ({why}): choose another with -o", path
        ) from error
    steps = f"{run.totals.num_steps:,} recorded steps" if run.totals.num_steps else "no history"
    typer.echo(
        f"{one_line(path)}: {many(len(run.entries), 'checkpoint')}, {steps}; open it in a browser"
    )


def _refuse_in_store(path: str, store: str) -> None:
    """Refuse to write where training writes: a report could take the place of a file there."""
    folder = os.path.realpath(os.path.dirname(os.path.abspath(path)))
    inside = os.path.realpath(store)
    if os.path.commonpath([folder, inside]) == inside:
        raise StoreError(
            errno.EINVAL, "a report is not written into a store: choose another file with -o", path
        )
