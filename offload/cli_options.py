"""What several commands of ``offload`` share."""

from __future__ import annotations

import json
from typing import Annotated

import typer

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
