"""Ranks with a tier, which a server forks, so that each of them is there within a moment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.ranks_training.rank_server import Job, Jobs

_NAMES = ("AWS_", "NO_PROXY")


def start(jobs: Jobs, folder: Path, into: str, num_ranks: int, case: dict[str, Any]) -> Job:
    """Start ranks of `tests.tiers.rank_program`.

    Args:
        jobs: Server of ranks.
        folder: Folder of the test.
        into: Name of the store's directory in it, or of the folder of all hosts.
        num_ranks: Number of ranks.
        case: What the ranks do.
    """
    environment = {name: value for name, value in os.environ.items() if name.startswith(_NAMES)}
    calls = [[{**case, "into": into}]] * num_ranks
    program = "tests.tiers.rank_program"
    return jobs.start(folder, calls, program=program, environment=environment)


def run(
    jobs: Jobs, folder: Path, into: str, num_ranks: int, case: dict[str, Any]
) -> list[dict[str, Any]]:
    """Run ranks, all of which must succeed; return what each one said."""
    ranks = start(jobs, folder, into, num_ranks, case).wait()
    failed = [(number, rank.errors) for number, rank in enumerate(ranks) if not rank.outcomes]
    assert not failed, failed
    return [rank.of("main")["value"] for rank in ranks]


def kill_all(job: Job) -> None:
    """Kill all ranks, as torchrun does when one has failed, and wait for their end."""
    for rank in range(len(job.pids)):
        job.kill(rank)
    job.wait()
