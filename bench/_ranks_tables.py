"""Tables of several ranks in the page of all ratios, from the recorded results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench._ranks_model import rows

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


def predictions(one: dict[str, Any], sizing: Mapping[str, Any], link: str) -> str:
    """Return the times of the model of many ranks beside those that were measured, as a table.

    Args:
        one: A result of `bench.ranks_step`.
        sizing: A result of `bench.sizing`, which has the rates.
        link: Link to the file of `sizing`.
    """
    text = (
        f"Predicted and measured times of {one['what']} parameters in 16 bits, into one store on "
        "one drive, and their ratio. The model has the rates of the drive and of the cores that "
        f"were recorded for one process ({link}), divided by the number of ranks, and does not "
        "count what ranks send to each other.\n\n"
    )
    return text + _table(("", "step", "seal", "restore"), rows(one, sizing))


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


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines) + "\n"
