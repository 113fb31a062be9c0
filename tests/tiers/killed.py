"""Processes that tests kill: a server forks them, so that none of them imports torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from offload.tiers import pull, push
from tests.eventually import eventually
from tests.ranks_training.calls import record, record_into
from tests.ranks_training.rank_server import Job, Jobs
from tests.tiers.copies import SMALL, new_in
from tests.tiers.rank_jobs import environment


def start(jobs: Jobs, folder: Path, what: str, source: str, target: str) -> Job:
    """Start a process that pushes, pulls, or restores from a tier, in the folder of a test."""
    program = "tests.tiers.killed"
    return jobs.start(
        folder, [[[what, source, target]]], program=program, environment=environment()
    )


def kill(job: Job) -> None:
    """Kill a process, and wait until none of its threads runs."""
    job.kill(0)
    place = Path(f"/proc/{job.pids[0]}/stat")
    assert eventually(lambda: place.read_text().rpartition(")")[2].split()[0] == "Z")


def run_calls(
    folder: Path, rank: int, size: int, calls: list[Any], setting: dict[str, Any]
) -> None:
    """Run one process; see `tests.ranks_training.rank_server`."""
    del rank, size
    os.environ.update(setting["environment"])
    record_into(folder)
    ((what, source, target),) = calls
    if what == "push":
        push(source, target, object_bytes=SMALL, num_transfers=2, retry_s=0)
    elif what == "pull":
        pull(source, target, num_transfers=2, retry_s=0)
    else:
        optimizer = new_in(Path(target), source)
        optimizer.restore()
        record("restored")
        optimizer.synchronize()
    record("main")
