"""The command ``offload``: the demo, and a look at stores and checkpoints.

Nothing heavy is imported before a command runs, so that ``offload --help`` answers at once. The
exit status is 0 for success, 1 for an error or for a checkpoint that is damaged or not usable, and
2 for wrong usage.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any, TextIO

import typer

from gds.errors import message_of
from offload.cli.exchange import export, import_
from offload.cli.listing import ls, show
from offload.cli.options import (
    AllowVolatile,
    Json,
    make_console,
    one_line,
    print_json,
    tree_bytes,
)
from offload.cli.report import report
from offload.cli.retention import pin, prune, unpin
from offload.cli.serve import serve
from offload.cli.sizing import size_command
from offload.cli.tiers import pull, push
from offload.cli.top import top
from offload.cli.usage import du
from offload.cli.verify import verify
from offload.errors import NearError, OffloadError
from offload.near.place import is_remote
from offload.units import size

app = typer.Typer(
    name="offload",
    no_args_is_help=True,
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
    near: Annotated[
        bool, typer.Option("--near", help="Let a server of its own update the state.")
    ] = False,
    beyond: Annotated[
        bool, typer.Option("--beyond", help="Keep parameters and gradients on the drive, too.")
    ] = False,
    allow_volatile: AllowVolatile = False,
    as_json: Json = False,
) -> None:
    """Train, be killed in the middle of a step, and resume.

    Losses after the resume, and the time of checkpoints, are compared with torch.save.
    """
    from offload.demo.report import show as show_demo
    from offload.demo.run import run_demo

    # With --json, standard output holds the JSON and nothing else.
    console = make_console(stderr=as_json)
    report = run_demo(
        console,
        model=model.value,
        directory=os.path.abspath(directory),
        steps=steps,
        near=near,
        beyond=beyond,
        allow_volatile=allow_volatile,
        quiet=as_json,
    )
    if as_json:
        print_json(report)
        return
    show_demo(report, console)
    store = report["store"]
    console.print(
        f"Loss on held-out text {report['first_loss']:.3f} -> {report['last_loss']:.3f} in "
        f"{report['steps']} steps; {report['elapsed_s']:.0f} s in all.\n"
        f"The checkpoints stay in {store} ({size(tree_bytes(store))}): look at them with "
        "offload ls, show and verify, then remove them.",
        highlight=False,
        soft_wrap=True,
    )


_COMMANDS: dict[str, Callable[..., None]] = {
    "ls": ls,
    "show": show,
    "du": du,
    "serve": serve,
    "top": top,
    "verify": verify,
    "report": report,
    "export": export,
    "import": import_,
    "prune": prune,
    "pin": pin,
    "unpin": unpin,
    "push": push,
    "pull": pull,
    "size": size_command,
}
_ASK_SERVERS = (ls, show, verify)
"""Commands that can ask a server about a store that it has."""


def _of_this_machine(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that refuses runs on a server."""

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        for value in (value for name, value in arguments.items() if name != "link"):
            for one in value if isinstance(value, list) else [value]:
                if isinstance(one, str) and is_remote(one):
                    name = next(n for n, known in _COMMANDS.items() if known is command)
                    raise NearError(
                        f"offload {name} must run where the server of {one} runs, with the "
                        "directory of the store"
                    )
        command(**arguments)

    return run


for name, command in _COMMANDS.items():
    app.command(name)(command if command in _ASK_SERVERS else _of_this_machine(command))


def main() -> None:
    """Run the command line. An expected error is one line on standard error, and status 1."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", RuntimeWarning)
        warnings.showwarning = _show_warning
        try:
            app()
        except BrokenPipeError:
            # The reader of our output has closed the pipe. Keep the interpreter from flushing.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        except (OffloadError, OSError) as error:
            _fail(one_line(message_of(error)))
        except MemoryError:
            _fail("out of memory")


def _fail(text: str) -> None:
    typer.secho(f"error: {text}", fg="red", err=True)
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
