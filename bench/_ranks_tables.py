"""The section of measurements in the page about several ranks, from the recorded results."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench._ranks_model import rates_for, rows

BEGIN, END = "<!-- drawn by python -m bench.report -->", "<!-- end of what is drawn -->"
BENCHES = ("ranks_step", "ranks_bytes", "ranks_agreement", "ranks_gather", "ranks_campaign")

_CALLS = ("step", "seal", "restore")
_KINDS = {"ddp": "DistributedDataParallel", "fsdp2": "FSDP2"}
_PARTS = {
    "steps": "rank 0, another or all killed before each message and file operation, on 2 ranks",
    "random": "killed at random moments",
    "stopped": "rank 0 stopped in a seal until the others gave up, then continued",
    "reshape": (
        "rank 0, another or all killed before messages and file operations of a re-cut, "
        "4 to 2 ranks and 1 to 3"
    ),
    "elastic": "2 ranks under torchrun killed at random moments, restarted by it",
}

_COUNTS = (
    "trials",
    "restarts",
    "resumed",
    "bits compared",
    "checkpoints verified",
    "lost",
)
"""Counts of each part of a campaign, which are the columns of the table."""


def redraw(page: str, runs: Sequence[dict[str, Any]], folder: Path) -> str:
    """Return the page with the section drawn anew.

    Args:
        page: Markdown of the page.
        runs: Recorded results, as `bench.report.read_results` returns them.
        folder: Folder of the page, for links.
    """
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{section(runs, folder)}\n{END}{after}"


def section(runs: Sequence[dict[str, Any]], folder: Path) -> str:
    """Return the section, without its heading; every figure in it is from a result."""
    parts = []
    for bench in BENCHES:
        own = [(one, _link(one, folder)) for one in runs if one["bench"] == bench]
        if bench == "ranks_campaign":
            parts += [campaign(own)] if own else []
        else:
            draw = _times if bench == "ranks_step" else _claims
            parts += [draw(one, link) for one, link in own]
        if bench == "ranks_step":
            rated = [(one, rates_for(one, runs)) for one, _ in own]
            parts += [_predictions(one, sizing, folder) for one, sizing in rated if sizing]
    return "\n".join(parts) if parts else "Nothing has been recorded yet.\n"


def _times(one: dict[str, Any], link: str) -> str:
    """Return the times of one process and of several ranks as a table."""
    medians = one["medians"]
    rows: list[Sequence[str]] = []
    for claim in one["claims"]:
        key, _, call = claim["numerator"].removesuffix("_s").rpartition("_")
        if call != "step":
            continue
        kind, ranks = key.split("_")
        times = {name: medians[f"{key}_{name}_s"] for name in _CALLS}
        alone = {name: medians[f"{key}_one_{name}_s"] for name in _CALLS}
        if not rows:
            rows.append(("one process", *(f"{alone[name]:.3g} s" for name in _CALLS), "", "", ""))
        low, high = claim["interval90"]
        limit = "-" if claim["limit"] is None else f"{claim['limit']:g}, {claim['verdict']}"
        interval = f"{low:.2f} to {high:.2f}"
        who = f"{ranks} ranks, {_KINDS[kind]}"
        row = (f"{claim['median']:.2f}", interval, limit)
        rows.append((who, *(f"{times[name]:.3g} s" for name in _CALLS), *row))
    head = ("", "step", "seal", "restore", "step beside one process's", "90 % interval", "limit")
    text = (
        f"Medians of {one['what']} parameters in 16 bits, into one store on one drive ({link}). "
        "The step of the ranks is measured in adjacent pairs with that of one process.\n\n"
    )
    return text + _table(head, rows)


def _predictions(one: dict[str, Any], sizing: Mapping[str, Any], folder: Path) -> str:
    """Return the times of the model of many ranks beside those that were measured, as a table."""
    text = (
        "Predicted and measured times of the same ranks, and their ratio. The model has the rates "
        f"of the drive and of the cores that were recorded for one process ({_link(sizing, folder)}"
        "), divided by the number of ranks, and does not count what ranks send to each other.\n\n"
    )
    return text + _table(("", "step", "seal", "restore"), rows(one, sizing))


def _claims(one: dict[str, Any], link: str) -> str:
    """Return the ratios of a result as a table."""
    rows = []
    for claim in one["claims"]:
        low, high = claim["interval90"]
        limit = "-" if claim["limit"] is None else f"{claim['limit']:g}, {claim['verdict']}"
        rows.append((claim["claim"], f"{claim['median']:.3f}", f"{low:.3f} to {high:.3f}", limit))
    if one["bench"] == "ranks_agreement":
        text = (
            f"The median agreement of a seal takes {1e3 * one['facts']['median_agreement_s']:.1f}"
        )
        text += f" ms, without rename and sync ({link}).\n\n"
    else:
        text = f"{link}:\n\n"
    return text + _table(("", "ratio", "90 % interval", "limit"), rows)


def campaign(runs: Sequence[tuple[dict[str, Any], str]]) -> str:
    """Return the counts of campaigns of faults as a table, and those of model files as text.

    Args:
        runs: Recorded campaigns, each with a link to its file.
    """
    rows, texts = [], []
    for one, link in runs:
        facts = one["facts"]
        for part, what in _PARTS.items():
            if f"{part}: problems" not in facts:
                continue
            counts = [facts.get(f"{part}: {name}", 0) for name in _COUNTS]
            problems = len(facts[f"{part}: problems"])
            rows.append((what, *(f"{count:,}" for count in (*counts, problems)), link))
        if "files: problems" in facts:
            texts.append(
                f"\nModel files of {facts['files: seals']:,} seals by three ranks "
                f"({facts['files: tensors compared']:,} tensors, "
                f"{facts['files: bytes compared']:,} bytes, rows of 2 to 4,094 bytes), beside "
                "those that the safetensors library writes: "
                f"{len(facts['files: problems'])} differ ({link}).\n"
            )
    return "".join([*([_table(("fault", *_COUNTS, "problems", "run"), rows)] * bool(rows)), *texts])


def _link(one: Mapping[str, Any], folder: Path) -> str:
    return f"[{one['what']}]({Path(os.path.relpath(one['path'], folder)).as_posix()})"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines) + "\n"
