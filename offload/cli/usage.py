"""Command ``offload du``: the space that a store takes now, by kind, and can take at most."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from offload.cli.options import Json, Parts, cell, make_console, print_json
from offload.tiers.services.address import is_tier_url
from offload.units import many, size

if TYPE_CHECKING:
    from offload.checkpoint.usage import Usage

_DEFAULT_KEEP = 2
"""Number of checkpoints that an optimizer keeps if it is not told otherwise."""


def du(
    store: Annotated[str, typer.Argument(help="Directory of a store.")],
    keep: Annotated[
        int | None,
        typer.Option(
            "--keep",
            min=1,
            help="Number of checkpoints that the training program keeps. Default: 2, or as many "
            "as there are if that is more.",
        ),
    ] = None,
    part: Parts = None,
    as_json: Json = False,
) -> None:
    """Say what a store takes now, and can take at most.

    Pinned checkpoints stay in addition to --keep. Each checkpoint takes one slot, and one more is
    written by steps. A reader or an upload that holds an old checkpoint can take one slot more for
    a while. Sizes are those of files; where checkpoints share frozen parameters (XFS, btrfs), less
    of the drive is taken.
    """
    if is_tier_url(store):
        raise typer.BadParameter("this is a tier; offload ls lists what it has")
    from offload.checkpoint.usage import usage_of

    usage = usage_of(store, parts=part or None)
    whole = usage.num_checkpoints - usage.num_parameters_only
    keep = max(_DEFAULT_KEEP, whole - usage.num_pinned) if keep is None else keep
    if as_json:
        print_json(
            {
                **dataclasses.asdict(usage),
                "total_bytes": usage.total_bytes,
                "keep": keep,
                "num_slots": usage.num_slots(keep),
                "at_most_bytes": usage.at_most_bytes(keep),
            }
        )
    else:
        _show(usage, keep)


def _show(usage: Usage, keep: int) -> None:
    from rich.table import Table

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    table.add_column(overflow="fold")
    whole = usage.num_checkpoints - usage.num_parameters_only
    pinned = f", {usage.num_pinned} of them pinned" if usage.num_pinned else ""
    remarks = {
        "state": f"in {many(whole, 'checkpoint')}{pinned}",
        "free_slots": f"{many(usage.num_free, 'slot')}, which steps write again",
        "not_usable": f"offload ls {usage.path} says why",
    }
    for kind, num_bytes in usage.kinds.items():
        if num_bytes or kind != "not_usable":
            remark = remarks.get(kind, "") if num_bytes else ""
            table.add_row(kind.replace("_", " "), size(num_bytes), cell(remark))
    table.add_row("now", size(usage.total_bytes))
    slots = many(usage.num_slots(keep), "slot")
    table.add_row(
        "at most",
        size(usage.at_most_bytes(keep)),
        cell(f"with keep={keep}: {slots} of {size(usage.slot_bytes)}"),
    )
    for directory, free in usage.free_bytes.items():
        where = f"in {directory}"
        if len(usage.directories) > 1:
            where += f", which has {size(usage.directories[directory])} of the store"
        table.add_row("free", size(free), cell(where))
    make_console().print(table)
