"""Options and output functions that several commands of ``offload`` share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

ProgressBar: TypeAlias = Callable[..., AbstractContextManager[Callable[[int, int], None]]]
"""Function that shows a progress bar with a title, unless ``quiet=`` is true. It returns a context
manager, which yields a function to call with the bytes done and the total."""

Parts = Annotated[
    list[str] | None,
    typer.Option(
        "--part",
        help="Present directory of the state on a further drive; one per drive, in order.",
        show_default=False,
    ),
]
"""Option for the present directories on further drives."""

Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
"""Option for output as JSON."""


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


def tree_bytes(path: str) -> int:
    """Return the size in bytes of a file, or of all files below a directory."""
    if not os.path.isdir(path):
        return os.path.getsize(path)
    return sum(
        os.path.getsize(os.path.join(folder, name))
        for folder, _, names in os.walk(path)
        for name in names
    )
