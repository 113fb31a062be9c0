"""What several commands of ``offload`` share."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Annotated, TypeAlias

import typer

ProgressBar: TypeAlias = Callable[..., AbstractContextManager[Callable[[int, int], None]]]
"""Shows a bar with a title, unless ``quiet=``; gives what to call with bytes done and in all."""

Parts = Annotated[
    list[str] | None,
    typer.Option(
        "--part",
        help="Where the state on a further drive is now, if it has moved; one for each, in order.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


def print_json(value: object) -> None:
    """Print a value as JSON on standard output."""
    typer.echo(json.dumps(value, indent=2))


def one_line(text: object) -> str:
    """Return what a store says as one line that does nothing to a terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text))
