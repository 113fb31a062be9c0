"""Jobs of `tests.ranks_training.beside`, as tests ask for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.ranks_training.rank_server import Jobs

Call = tuple[str, dict[str, Any]]
"""Name of a call of `tests.ranks_training.beside`, and its arguments."""


def run(
    jobs: Jobs, folder: Path, num_ranks: int, calls: list[Call], module: str = "beside"
) -> list[list[Any]]:
    """Make calls on all ranks, all of which succeed; return what came of them, by call and rank."""
    ranks = jobs.run(folder, [calls] * num_ranks, program=f"tests.ranks_training.{module}")
    for rank in ranks:
        assert rank.has_come_to_its_end, rank.errors
        assert rank.failed() == [], rank.errors
    values = [[outcome["value"] for outcome in rank.outcomes] for rank in ranks]
    return [[*found] for found in zip(*values, strict=True)]
