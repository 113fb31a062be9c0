"""The command ``offload``: the demo, and a look at stores and checkpoints.

Nothing heavy is imported before a command runs, so that ``offload --help`` answers at once. The
exit status is 0 for success, 1 for an error or for a checkpoint that is damaged or not usable, and
2 for wrong usage.
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from gds.errors import message_of
from offload.cli import exchange, listing, retention, sizing, tiers, verify
from offload.cli.options import Json, Parts, cell, make_console, one_line, tree_bytes
from offload.cli.options import print_json as _print_json
from offload.errors import OffloadError
from offload.tiers.services.address import is_tier_url
from offload.units import size

if TYPE_CHECKING:
    from offload.checkpoint.checkpoint import Checkpoint

app = typer.Typer(
    name="offload",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich keeps the line breaks of docstrings
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from offload import __version__

        typer.echo(f"offload {__version__}")
        raise typer.Exit


@app.callback()
def offload(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Train with optimizer state on SSD, and inspect the checkpoints made from it."""


class DemoModel(StrEnum):
    """The models that the demo can train."""

    smollm2 = "smollm2"
    tiny = "tiny"


@app.command()
def demo(
    model: Annotated[
        DemoModel, typer.Option(help="SmolLM2-135M (minutes), or a small GPT (seconds).")
    ] = DemoModel.smollm2,
    directory: Annotated[
        str, typer.Option(help="Directory for the store, on the SSD to be shown.")
    ] = "offload-demo",
    steps: Annotated[
        int | None, typer.Option(min=4, help="Total number of optimizer steps.")
    ] = None,
    allow_volatile: Annotated[
        bool, typer.Option("--allow-volatile", help="Accept a directory in memory (tmpfs).")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train, be killed in the middle of a step, and resume.

    Losses after the resume, and the time of checkpoints, are compared with torch.save.
    """
    from offload.demo.run import run_demo

    # With --json, standard output holds the JSON and nothing else.
    console = make_console(stderr=as_json)
    report = run_demo(
        console,
        model=model.value,
        directory=os.path.abspath(directory),
        steps=steps,
        allow_volatile=allow_volatile,
        quiet=as_json,
    )
    if as_json:
        _print_json(report.to_json())
        return
    report.show(console)
    console.print(
        f"Loss on held-out text {report.first_loss:.3f} -> {report.last_loss:.3f} in "
        f"{report.steps} steps; {report.elapsed_s:.0f} s in all.\n"
        f"The checkpoints stay in {report.store} ({size(tree_bytes(report.store))}): look at them "
        "with offload ls, show and verify, then remove them.",
        highlight=False,
        soft_wrap=True,
    )


@app.command("ls")
def list_store(
    store: Annotated[
        str, typer.Argument(help="Directory of a store, or URL of a tier.", show_default=False)
    ],
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
    read; verify reads the content. The URL of a tier (s3://bucket/folder) lists the copies in it.
    """
    if is_tier_url(store):
        tiers.list_url(store, as_json=as_json)
        return
    from offload.checkpoint.listing import list_checkpoints, list_unnamed_parts

    found = list_checkpoints(store, parts=part or None)
    if as_json:
        _print_json([dataclasses.asdict(info) for info in found])
    else:
        listing.show_list(store, found, wide=wide)
        listing.show_unnamed(list_unnamed_parts(store, parts=part or None))
        tiers.show_decisions(store)
    retention.show_lost_pins(store, found)


@app.command()
def show(
    checkpoint: Annotated[
        str, typer.Argument(help="Checkpoint, or store: its newest checkpoint.", show_default=False)
    ],
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    part: Parts = None,
    as_json: Json = False,
) -> None:
    """Describe a checkpoint: its optimizer, files and tensors."""
    from offload.checkpoint.opening import open_checkpoint

    with open_checkpoint(checkpoint, parts=part or None) as opened:
        description = _describe(opened)
    if as_json:
        groups = description["hyperparameters"]
        description["hyperparameters"] = _as_json(groups)
        _print_json(description)
    else:
        _show_description(description, tensors=tensors)


@contextmanager
def _progress(path: str, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on standard error, if that is a terminal."""
    from rich import progress

    console = make_console(stderr=True)
    with progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=quiet or not console.is_terminal,
    ) as bar:
        task = bar.add_task(os.path.basename(path), total=None)

        def update(done: int, total: int) -> None:
            """Show the bytes done and the total."""
            bar.update(task, completed=done, total=total)

        yield update


verify.register(app, _progress)
exchange.register(app, _progress)


def _describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return all that `show` prints, as JSON values; only hyper-parameters may be tensors."""
    return {
        "path": checkpoint.path,
        "step": checkpoint.step,
        "generation": checkpoint.generation,
        "created": checkpoint.created,
        "optimizer": checkpoint.optimizer,
        "update_code": checkpoint.update_code,
        "metrics": checkpoint.metrics,
        "parts": checkpoint.parts,
        "owners": [
            {"owner": one.reference.owner, "path": one.path, "seen": one.table is not None}
            for one in (checkpoint.owners if checkpoint.manifest.owners else [])
        ],
        "num_parameters": checkpoint.num_parameters,
        "hyperparameters": checkpoint.hyperparameters,
        "state_arrays": checkpoint.state_arrays,
        "files": checkpoint.files,
        "tensors": [
            {"name": entry.name, "dtype": entry.dtype, "shape": list(entry.shape)}
            for entry in checkpoint.tensors
        ],
    }


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


retention.register(app, _progress)
tiers.register(app, _progress)
sizing.register(app)


def main() -> None:
    """Run the command line. An expected error is one line on standard error, and status 1."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", RuntimeWarning)
        warnings.showwarning = _show_warning
        _run()


def _run() -> None:
    try:
        app()
    except BrokenPipeError:
        # The reader of our output has closed the pipe. Keep the interpreter from flushing to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (OffloadError, OSError) as error:
        typer.secho(f"error: {one_line(message_of(error))}", fg="red", err=True)
        sys.exit(1)
    except MemoryError:
        typer.secho("error: out of memory", fg="red", err=True)
        sys.exit(1)


def _show_warning(
    message: Warning | str,
    category: type[Warning],  # noqa: ARG001
    filename: str,  # noqa: ARG001
    lineno: int,  # noqa: ARG001
    file: TextIO | None = None,  # noqa: ARG001
    line: str | None = None,  # noqa: ARG001
) -> None:
    """Print a warning in one line, without the place in the code that it comes from."""
    typer.secho(f"warning: {one_line(message)}", fg="yellow", err=True)
