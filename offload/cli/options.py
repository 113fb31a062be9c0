"""Options, arguments and output that several commands of ``offload`` share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from rich.text import Text

CheckpointPath = Annotated[str, typer.Argument(help="Checkpoint, or store: its newest checkpoint.")]
StorePath = Annotated[str, typer.Argument(help="Directory of a store, or URL of a tier.")]
Parts = Annotated[
    list[str] | None,
    typer.Option(
        "--part",
        help="Present directory of the state on a further drive; one per drive, in order.",
    ),
]
AllowVolatile = Annotated[
    bool, typer.Option("--allow-volatile", help="Accept a directory in memory (tmpfs).")
]
AllowRemote = Annotated[
    bool,
    typer.Option(
        "--allow-remote",
        help="Accept a directory that another machine or a program serves (NFS, FUSE).",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]

CHECKPOINT_COLUMNS = ("checkpoint", "created", "size", "state")


def print_json(value: object) -> None:
    """Print a value as JSON on standard output."""
    typer.echo(json.dumps(value, indent=2))


def one_line(text: object) -> str:
    """Return text from a store as one line without characters that control a terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text))


def make_console(*, stderr: bool = False, width: int | None = None) -> Console:
    """Return a console on standard output, or on standard error."""
    from rich.console import Console

    return Console(stderr=stderr, width=width)


def cell(text: object) -> Text:
    """Return a cell of a table whose text is not taken for markup."""
    from rich.text import Text

    return Text(one_line(text))


def moment(created: str) -> Text:
    """Return a cell with the date and the minute of an ISO time."""
    return cell(created[:16].replace("T", " "))


def print_checkpoints(
    rows: Sequence[Sequence[Text]], notes: str = "", *, width: int | None = None
) -> None:
    """Print a table with a line for each checkpoint; `notes` is the head of a fifth column."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    for header in (*CHECKPOINT_COLUMNS, *([notes] if notes else [])):
        table.add_column(header, no_wrap=True, justify="right" if header == "size" else "left")
    for row in rows:
        table.add_row(*row)
    make_console(width=width).print(table)


@contextmanager
def progress_bar(title: str, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on standard error, if that is a terminal.

    Yields a function to call with the bytes done and the total.
    """
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
        task = bar.add_task(os.path.basename(title), total=None)

        def update(done: int, total: int) -> None:
            """Show the bytes done and the total."""
            bar.update(task, completed=done, total=total)

        yield update


def tree_bytes(path: str) -> int:
    """Return the size in bytes of a file, or of all files below a directory."""
    if not os.path.isdir(path):
        return os.path.getsize(path)
    return sum(
        os.path.getsize(os.path.join(folder, name))
        for folder, _, names in os.walk(path)
        for name in names
    )
