"""Command ``offload verify``: read every byte of checkpoints, even beside a training process.

Nothing heavy is imported before the command runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from offload.cli.options import Json, Parts, one_line, print_json, progress_bar
from offload.cli.tiers import verify_url
from offload.near.place import is_remote
from offload.tiers.services.address import is_tier_url
from offload.units import grouped, part_options, size

if TYPE_CHECKING:
    from offload.store.verification import Verified


def verify(
    path: Annotated[
        str,
        typer.Argument(help="Checkpoint, or store or URL of a tier: all checkpoints in it."),
    ],
    below: Annotated[
        bool, typer.Option("--all", help="Verify every store in this directory and below it.")
    ] = False,
    quarantine: Annotated[
        bool,
        typer.Option(
            "--quarantine",
            help="Mark damaged checkpoints, so that nothing uses them, and lift the marks of "
            "whole ones.",
        ),
    ] = False,
    part: Parts = None,
    as_json: Json = False,
) -> None:
    """Compare every byte of checkpoints with digests.

    If a store is on several drives, --part names its further directories. Without --part, the
    directories in the manifest are read. In a copy of a store, those still belong to the
    original, so --quarantine marks nothing because of damage in them, and lifts no mark.

    This command may run beside training. A checkpoint that training recycles in the meantime
    does not count as damaged. The URL of a tier (s3://bucket/folder), or of one copy in it,
    reads the complete copies there. A run on a server (offload+unix:///path/of/socket/run) is
    verified by the server.
    """
    if is_tier_url(path) and not is_remote(path):
        if below or quarantine or part:
            raise typer.BadParameter("a tier has no --all, --quarantine or --part")
        verify_url(path, as_json=as_json)
        return
    if is_remote(path):
        from offload.near.reading import verify as verify_there

        if below or quarantine or part:
            raise typer.BadParameter("a server has no --all, --quarantine or --part: run it there")
        results, recycled = verify_there(path)
    else:
        from offload.store.verification import Verification

        work = Verification(
            part or None,
            mark=quarantine,
            progress=lambda name: progress_bar(name, quiet=as_json),
        )
        if below:
            work.verify_below(path)
        else:
            work.verify(path, may_be_empty=False)
        results, recycled = work.results, work.recycled
    results.sort(key=lambda result: result.path)
    ok = all(result.report.ok for result in results)
    if as_json:
        found = [result.to_json() for result in results]
        print_json({"ok": ok, "checkpoints": found, "recycled": recycled})
    else:
        unread = [r for r in results if not r.report.bytes_checked]
        for text in grouped([(r.path, problem) for r in unread for problem in r.report.problems]):
            typer.secho(one_line(text), fg="red", err=True)
        for result in results:
            _show(result, mark=quarantine)
        for name in recycled:
            typer.echo(f"{one_line(name)}: recycled in the meantime, so it was not checked")
    if not ok:
        raise typer.Exit(1)


def _show(result: Verified, *, mark: bool) -> None:
    name, report = one_line(result.path), result.report
    problems = report.problems if report.bytes_checked else ()  # others are printed in groups
    for problem in (*problems, *report.unreadable):
        typer.secho(one_line(problem), fg="red", err=True)
    for path in report.not_seen:
        typer.echo(
            f"{name}: not seen here, so not checked: {one_line(path)}. Verify it on its node, or "
            "give the directory of the store in which it is now with --part"
        )
    places = one_line(", ".join(result.recorded))
    options = one_line(part_options(result.recorded))
    if report.problems:
        marked = "; marked as damaged, so that no reader uses it" if report.quarantined else ""
        if mark and not marked and places:
            marked = (
                f"; not marked, because its other directories ({places}) are known from its "
                "manifest only, and the manifest of a copy names the directories of the original. "
                f"If they belong to this checkpoint, add {options}; otherwise add the same "
                "options with its own directories"
            )
        # Nothing is read of a checkpoint that cannot be opened, for example if a drive is missing.
        found = "damaged" if report.bytes_checked else "not usable; its content was not read"
        typer.secho(f"{name}: {found}{marked}", fg="red")
    elif report.unreadable:
        typer.secho(f"{name}: not everything could be read", fg="red")
    elif report.quarantined:
        lifting = f"offload verify --quarantine {options}".rstrip()
        typer.secho(
            f"{name}: {size(report.bytes_checked)}, all as written, but still quarantined: "
            f"{lifting} lifts the "
            f"quarantine{', if these directories are its own' if places else ''}",
            fg="yellow",
        )
    else:
        lifted = "; its quarantine is lifted" if result.lifted else ""
        read = f" (read in {places} as well, which its manifest names)" if places else ""
        typer.secho(
            f"{name}: {size(report.bytes_checked)}, all as written{read}{lifted}", fg="green"
        )
