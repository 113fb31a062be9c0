"""Report of an examination, printed for people."""

from __future__ import annotations

from typing import Final

import typer

from gds.check.choice import CONSIDERED, Choice
from gds.check.examine import Examination
from gds.paths import PATHS

_COLOURS: Final = {"ok": "green", "limits": "yellow", "missing": "red"}
_TITLES: Final = {"machine": "Machine", "storage": "Storage", "gpu": "GPU"}


def show(found: Examination) -> None:
    """Print an examination on standard output."""
    section = ""
    for finding in found.findings:
        if finding.section != section:
            section = finding.section
            typer.secho(f"\n{_TITLES[section]}", bold=True)
        typer.secho(f"  {finding.verdict:<8}", fg=_COLOURS[finding.verdict], nl=False)
        typer.echo(f"{finding.what:<20} {finding.value}")
        if finding.why:
            typer.echo(f"{'':10}why: {finding.why}")
        if finding.do:
            typer.echo(f"{'':10}do:  {finding.do}")
    typer.secho(f"\nPaths in {found.directory}", bold=True)
    for what, choice in (("reads", found.reads), ("writes", found.writes)):
        _show_choice(what, choice)


def _show_choice(what: str, choice: Choice) -> None:
    """Print the path of one direction, and the reasons against better paths."""
    if choice.path is None:
        typer.secho(f"  {what:<8}none", fg="red")
    else:
        typer.secho(f"  {what:<8}{choice.path}: {PATHS[choice.path].title}", fg="green")
    better = CONSIDERED if choice.path is None else CONSIDERED[: CONSIDERED.index(choice.path)]
    for name in better:
        typer.echo(f"{'':10}not {name}: {choice.why_not[name]}")
