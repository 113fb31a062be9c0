"""Commands ``offload push`` and ``pull``, and what ``ls``, ``verify`` and ``prune`` do with tiers.

Nothing heavy is imported before a command runs.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offload.cli.options import Json, Parts, ProgressBar, cell, make_console, one_line, print_json
from offload.units import many, rate, size

if TYPE_CHECKING:
    from collections.abc import Iterable

    from offload.retention.policy import Retention
    from offload.tiers.catalog import TierCopy

Url = Annotated[
    str,
    typer.Argument(
        help="URL of the tier: s3://bucket/folder, gs://..., az://... or file:///folder.",
        show_default=False,
    ),
]
"""Argument for the URL of a tier."""

Transfers = Annotated[
    int, typer.Option("--transfers", min=1, max=64, help="Number of transfers at a time.")
]
"""Option for the number of transfers at a time."""

Timeout = Annotated[
    float, typer.Option("--timeout", min=1, help="Seconds after which one request is given up.")
]
"""Option for the longest time that one request may take."""

Retry = Annotated[
    float, typer.Option("--retry", min=0, help="Seconds for which a failed request is repeated.")
]
"""Option for how long requests are repeated."""


def register(app: typer.Typer, progress_bar: ProgressBar) -> None:
    """Add the commands ``push`` and ``pull`` to the program."""

    @app.command()
    def push(
        path: Annotated[
            str,
            typer.Argument(help="Checkpoint, or store: its newest checkpoint.", show_default=False),
        ],
        url: Url,
        size_only: Annotated[
            bool,
            typer.Option(
                "--size-only",
                help="Do not read objects back; compare only their sizes.",
            ),
        ] = False,
        transfers: Transfers = 4,
        timeout: Timeout = 600,
        retry: Retry = 180,
        part: Parts = None,
        as_json: Json = False,
    ) -> None:
        """Upload a checkpoint to a tier.

        Every object is read back and compared with the digests of the checkpoint. Until the last
        one is right, nothing is offered. If the command is interrupted, repeat it: it goes on from
        where it was. It may run beside training, which it never delays. If training recycles the
        checkpoint meanwhile, the command ends with an error; offload pin keeps the checkpoint.
        """
        from offload.tiers.push import push as run

        with progress_bar(url, quiet=as_json) as progress:
            report = run(
                path,
                url,
                parts=part or None,
                check="size" if size_only else "read",
                num_transfers=transfers,
                timeout_s=timeout,
                retry_s=retry,
                progress=progress,
            )
        if as_json:
            print_json(dataclasses.asdict(report))
            return
        place = one_line(report.url)
        if report.already_complete:
            typer.echo(f"{place}: has a complete copy of step {report.step} already")
            return
        before = f"; {size(report.bytes_kept)} had been sent before" if report.bytes_kept else ""
        speed = rate(report.bytes_sent / report.seconds) if report.seconds else ""
        typer.echo(
            f"{place}: step {report.step}, {many(report.num_sent, 'object')} sent with "
            f"{size(report.bytes_sent)} ({speed}){before}"
        )

    @app.command()
    def pull(
        url: Url,
        directory: Annotated[
            str,
            typer.Argument(
                help="Directory of the store: new, empty, or with older checkpoints of the same "
                "store.",
                show_default=False,
            ),
        ],
        step: Annotated[
            int | None,
            typer.Option(help="Step of the checkpoint; the newest by default.", show_default=False),
        ] = None,
        transfers: Transfers = 4,
        timeout: Timeout = 600,
        retry: Retry = 180,
        allow_volatile: Annotated[
            bool, typer.Option("--allow-volatile", help="Accept a directory in memory (tmpfs).")
        ] = False,
        allow_remote: Annotated[
            bool, typer.Option("--allow-remote", help="Accept a network file system.")
        ] = False,
        part: Parts = None,
        as_json: Json = False,
    ) -> None:
        """Download a checkpoint from a tier into a store.

        The newest checkpoint is taken, or the one of --step, or the one whose URL offload ls
        prints. Every byte is compared with its digest. The checkpoint appears when it is complete
        and durable. If the command is interrupted, repeat it: it goes on from where it was. With
        --part the state is spread over further drives.
        """
        from offload.tiers.pull import pull as run

        with progress_bar(url, quiet=as_json) as progress:
            report = run(
                url,
                directory,
                parts=part or (),
                step=step,
                num_transfers=transfers,
                timeout_s=timeout,
                retry_s=retry,
                allow_volatile=allow_volatile,
                allow_remote=allow_remote,
                progress=progress,
            )
        if as_json:
            print_json(dataclasses.asdict(report))
            return
        if report.already_there:
            typer.echo(f"{report.path}: is there already")
            return
        before = f"; {size(report.bytes_kept)} were there" if report.bytes_kept else ""
        speed = rate(report.bytes_fetched / report.seconds) if report.seconds else ""
        typer.echo(f"{report.path}: fetched {size(report.bytes_fetched)} ({speed}){before}")


_NUM_DECISIONS = 8
"""Number of decisions that `show_decisions` prints for each tier."""


def show_decisions(store: str) -> None:
    """Print the last decisions about uploads of a store's checkpoints, if there are any."""
    from offload.tiers.tier_stats import read_decisions

    for url, events in read_decisions(store).items():
        typer.echo(f"tier {one_line(url)}:")
        for event in events[-_NUM_DECISIONS:]:
            outcome = f" -> {event.outcome}" if event.outcome else ""
            typer.echo(one_line(f"  step {event.step}: {event.choice}{outcome} ({event.reason})"))


def list_url(url: str, *, as_json: bool) -> None:
    """List the copies in a tier."""
    from offload.tiers.verification import list_tier

    copies = list_tier(url)
    if as_json:
        print_json([_as_json(copy) for copy in copies])
        return
    if not copies:
        typer.echo(
            f"{one_line(url)}: no copies of checkpoints; if there should be some: is its drive "
            "mounted, and is this the right endpoint?"
        )
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    for header in ("checkpoint", "created", "size", "state"):
        table.add_column(header, no_wrap=True, justify="right" if header == "size" else "left")
    for copy in copies:
        marker = copy.marker
        if marker is None:
            name = cell(f"generation {copy.identity.generation}")
            if copy.parameters is None:
                table.add_row(name, cell("-"), cell("-"), Text("not complete", style="yellow"))
                continue
            table.add_row(
                cell(f"step {copy.parameters.step}"),
                cell(copy.parameters.created[:16].replace("T", " ")),
                cell(size(copy.parameters.nbytes)),
                Text("parameters only", style="yellow"),
            )
        else:
            table.add_row(
                cell(f"step {marker.step}"),
                cell(marker.created[:16].replace("T", " ")),
                cell(size(marker.nbytes)),
                Text("not whole", style="red") if copy.reason else Text("complete", style="green"),
            )
    make_console().print(table)
    for copy in copies:
        typer.echo(one_line(f"{copy.url}{f': {copy.reason}' if copy.reason else ''}"))
    typer.echo(f"complete: every object was checked when it was sent (offload verify {url})")


def verify_url(url: str, progress_bar: ProgressBar, *, as_json: bool) -> None:
    """Verify the complete copies in a tier; exit with status 1 if one is damaged."""
    from offload.tiers.verification import verify_tier

    with progress_bar(url, quiet=as_json) as progress:
        reports = verify_tier(url, progress=progress)
    ok = all(report.ok for report in reports)
    if as_json:
        copies = [{"ok": report.ok, **dataclasses.asdict(report)} for report in reports]
        print_json({"ok": ok, "copies": copies})
    else:
        for report in reports:
            state = "ok" if report.ok else "damaged"
            typer.secho(
                f"{one_line(report.url)}: step {report.step}: {state}, "
                f"{size(report.bytes_checked)} checked",
                fg="green" if report.ok else "red",
            )
            for problem in report.problems:
                typer.secho(one_line(problem), fg="red")
            if report.foreign:
                names = one_line(", ".join(report.foreign[:5]))
                typer.echo(f"  also there, not written by this library, and left alone: {names}")
    if not ok:
        raise typer.Exit(1)


def prune_url(
    url: str,
    policy: Retention | None,
    *,
    unfinished: bool,
    verify: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Remove copies from a tier."""
    from offload.tiers.pruning import prune_tier

    report = prune_tier(url, policy, unfinished=unfinished, verify=verify, dry_run=dry_run)
    if as_json:
        groups = {
            field.name: [_as_json(copy) for copy in getattr(report, field.name)]
            for field in dataclasses.fields(report)
        }
        print_json({"dry_run": dry_run, **groups})
        return
    verb = "would be removed" if dry_run else "removed"
    for copy in (*report.removed, *report.unfinished):
        typer.echo(f"{one_line(copy.url)}: {verb}")
    for copy in report.left_alone:
        remedy = "" if unfinished else " (--unfinished removes it)"
        typer.secho(
            f"{one_line(copy.url)}: left alone: {one_line(copy.reason)}{remedy}", fg="yellow"
        )
    typer.echo(f"kept: {_steps(report.kept)}")


def _steps(copies: Iterable[TierCopy]) -> str:
    return ", ".join(f"step {copy.marker.step}" for copy in copies if copy.marker) or "none"


def _as_json(copy: TierCopy) -> dict[str, Any]:
    marker = copy.marker
    return {
        "url": copy.url,
        "store": copy.identity.store_id,
        "generation": copy.identity.generation,
        "complete": marker is not None,
        "reason": copy.reason,
        "step": marker.step if marker else None,
        "created": marker.created if marker else None,
        "bytes": marker.nbytes if marker else None,
        "metrics": dict(marker.metrics) if marker else {},
    }
