"""Commands ``offload push`` and ``pull``, and what ``ls``, ``verify`` and ``prune`` do with tiers.

Nothing heavy is imported before a command runs.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offload.cli.options import (
    AllowRemote,
    AllowVolatile,
    CheckpointPath,
    Json,
    Parts,
    cell,
    moment,
    one_line,
    print_checkpoints,
    print_json,
    progress_bar,
)
from offload.units import many, rate, size

if TYPE_CHECKING:
    from rich.text import Text

    from offload.retention.policy import Retention
    from offload.tiers.catalog import TierCopy

Url = Annotated[
    str,
    typer.Argument(
        help="URL of the tier: s3://bucket/folder, gs://..., az://... or file:///folder."
    ),
]
Transfers = Annotated[
    int, typer.Option("--transfers", min=1, max=64, help="Number of transfers at a time.")
]
Timeout = Annotated[
    float, typer.Option("--timeout", min=1, help="Seconds after which one request is given up.")
]
Retry = Annotated[
    float, typer.Option("--retry", min=0, help="Seconds for which a failed request is repeated.")
]


def push(
    path: CheckpointPath,
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
    from offload.tiers.upload import push as run

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


def pull(
    url: Url,
    directory: Annotated[
        str,
        typer.Argument(
            help="Directory of the store: new, empty, or with older checkpoints of the same store."
        ),
    ],
    step: Annotated[
        int | None,
        typer.Option(help="Step of the checkpoint; the newest by default."),
    ] = None,
    transfers: Transfers = 4,
    timeout: Timeout = 600,
    retry: Retry = 180,
    allow_volatile: AllowVolatile = False,
    allow_remote: AllowRemote = False,
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


def show_decisions(store: str) -> None:
    """Print the last decisions about uploads of a store's checkpoints, if there are any."""
    from offload.tiers.upload_thread import read_decisions

    for url, events in read_decisions(store).items():
        typer.echo(f"tier {one_line(url)}:")
        for event in events[-8:]:
            outcome = f" -> {event.outcome}" if event.outcome else ""
            typer.echo(one_line(f"  step {event.step}: {event.choice}{outcome} ({event.reason})"))


def list_url(url: str, *, as_json: bool) -> None:
    """List the copies in a tier."""
    from offload.tiers.maintenance import list_tier

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
    print_checkpoints([_cells(copy) for copy in copies])
    for copy in copies:
        typer.echo(one_line(f"{copy.url}{f': {copy.reason}' if copy.reason else ''}"))
    typer.echo(f"complete: every object was checked when it was sent (offload verify {url})")


def _cells(copy: TierCopy) -> list[Text]:
    from rich.text import Text

    whole = copy.marker or copy.parameters
    if whole is None:
        state = Text("not complete", style="yellow")
        return [cell(f"generation {copy.identity.generation}"), cell("-"), cell("-"), state]
    if copy.marker is None:
        state = Text("parameters only", style="yellow")
    elif copy.reason:
        state = Text("not whole", style="red")
    else:
        state = Text("complete", style="green")
    return [cell(f"step {whole.step}"), moment(whole.created), cell(size(whole.nbytes)), state]


def verify_url(url: str, *, as_json: bool) -> None:
    """Verify the complete copies in a tier; exit with status 1 if one is damaged."""
    from offload.tiers.maintenance import verify_tier

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
    from offload.tiers.maintenance import prune_tier

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
    kept = ", ".join(f"step {copy.marker.step}" for copy in report.kept if copy.marker)
    typer.echo(f"kept: {kept or 'none'}")


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
