"""Commands ``offload prune``, ``pin`` and ``unpin``, which control what a store keeps.

Nothing heavy is imported before a command runs.
"""

from __future__ import annotations

import dataclasses
import os
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offload.cli.options import CheckpointPath, Json, Parts, StorePath, print_json, progress_bar
from offload.cli.tiers import prune_url
from offload.tiers.services.address import is_tier_url
from offload.units import size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offload.retention.policy import Retention
    from offload.store.pruning import PruneReport


def prune(
    store: StorePath,
    keep: Annotated[
        int | None,
        typer.Option(min=1, help="Keep this many of the newest checkpoints."),
    ] = None,
    every: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Keep the first checkpoint at or after each multiple of this step number.",
        ),
    ] = None,
    every_seconds: Annotated[
        float | None,
        typer.Option(help="Keep one checkpoint per this many seconds."),
    ] = None,
    best: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METRIC[:min|max[:K]]",
            help="Keep the best checkpoint, or the best K, by a metric. The smallest value is "
            "best, or with max the largest.",
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="First read every byte of the checkpoints that stay; remove nothing if one is "
            "damaged. In a tier, damaged copies do not count as kept.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Change nothing; show what would be removed.")
    ] = False,
    unfinished: Annotated[
        bool,
        typer.Option(
            "--unfinished",
            help="In a tier: remove copies that are not complete as well. No upload may run.",
        ),
    ] = False,
    part: Parts = None,
    as_json: Json = False,
) -> None:
    """Remove checkpoints that no option keeps.

    Files that crashes have left behind are removed as well.
    The newest checkpoint and pinned ones always stay. Without any option that keeps
    checkpoints, all of them stay. A store does not record the keep= of the program that
    trained in it: give the same policy here. A store on several drives needs --part for each
    further directory, because the manifests of a copied store name directories of the original.
    The command is refused while a process trains in the store.
    The URL of a tier (s3://bucket/folder) removes copies from it by the same options.
    """
    policy = _policy(keep, every, every_seconds, best or [])
    if is_tier_url(store):
        if part:
            raise typer.BadParameter("a tier has no --part")
        prune_url(
            store,
            policy,
            unfinished=unfinished,
            verify=verify,
            dry_run=dry_run,
            as_json=as_json,
        )
        return
    if unfinished:
        raise typer.BadParameter("--unfinished is for tiers")
    from offload.store.pruning import prune as run

    with progress_bar(store, quiet=as_json or not verify) as progress:
        report = run(
            store,
            policy,
            dry_run=dry_run,
            verify=verify,
            progress=progress,
            parts=part or None,
        )
    if as_json:
        print_json({"dry_run": dry_run, "bytes": report.bytes, **dataclasses.asdict(report)})
        return
    _show_pruned(report, dry_run=dry_run)


def pin(
    checkpoint: CheckpointPath,
    name: Annotated[str, typer.Argument(help="Name of the pin, such as best.")],
) -> None:
    """Keep a checkpoint until it is unpinned.

    The command may run beside a process that trains in the store.
    """
    from offload.store.pinning import pin as run

    typer.echo(f"{run(checkpoint, name)}: pinned as {name}")


def unpin(
    store: Annotated[str, typer.Argument(help="Directory of a store.")],
    name: Annotated[str, typer.Argument(help="Name of the pin.")],
) -> None:
    """Remove a pin. Retention then decides again whether its checkpoint stays."""
    from offload.store.pinning import unpin as run

    run(store, name)
    typer.echo(f"{store}: removed the pin {name}")


def _policy(
    keep: int | None, every: int | None, every_seconds: float | None, best: Sequence[str]
) -> Retention | None:
    from offload.retention.policy import BestBy, EverySeconds, EverySteps, LastK

    policies: list[Retention] = []
    try:
        if keep is not None:
            policies.append(LastK(keep))
        if every is not None:
            policies.append(EverySteps(every))
        if every_seconds is not None:
            policies.append(EverySeconds(every_seconds))
        for text in best:
            metric, *rest = text.split(":")
            mode: Any = rest[0] if rest else "min"
            if len(rest) > 2:
                raise ValueError(f"{text!r} is not METRIC[:min|max[:K]]")
            policies.append(BestBy(metric, int(rest[1]) if len(rest) > 1 else 1, mode))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return reduce(or_, policies) if policies else None


def _show_pruned(report: PruneReport, *, dry_run: bool) -> None:
    verb = "would be removed" if dry_run else "removed"
    for removed in (*report.checkpoints, *report.leftovers):
        typer.echo(f"{removed.path}: {verb}, {size(removed.bytes)}")
    for path in report.being_read:
        typer.secho(
            f"{path}: not removed, because it is being read; prune again later", fg="yellow"
        )
    for path, reason in report.refused:
        typer.secho(f"{path}: not usable, and left alone: {reason}", fg="yellow")
    for path, reason in report.unnamed:
        typer.secho(f"{path}: left alone: {reason}", fg="yellow")
    kept = ", ".join(os.path.basename(path) for path in report.kept) or "none"
    typer.echo(f"{size(report.bytes)} {verb}; kept: {kept}")
    if report.checkpoints and not report.verified:
        typer.echo(
            "the checkpoints that are kept were not read (offload prune --verify reads them first)"
        )
