"""Ranks of one elastic run, killed again and again, beside a run that nobody disturbs."""

from __future__ import annotations

import random
import shutil
import signal
import time
from pathlib import Path
from typing import Final

from bench._elastic_job import ElasticJob, contents
from bench._ranks_jobs import Tally

_EVERY: Final = 3
"""Steps from checkpoint to checkpoint."""

_MOST_STEPS: Final = 10
"""Most steps that a start prints before a rank of it is killed in training."""

_MOMENTS_S: Final = {"beginning": 0.4, "training": 0.03, "any": 5.0}
"""Most seconds until the kill: after a start has its ranks, which then make the optimizer and
restore; after a step; or after the kill before, so that the ranks may just be starting."""


def kill_elastic(folder: Path, num_kills: int, seed: int, num_ranks: int = 2) -> Tally:
    """Kill ranks of one run under torchrun, which restarts them by itself, and compare its end.

    Args:
        folder: New folder for everything.
        num_kills: Number of kills by SIGKILL. Each fourth time SIGTERM is sent in between.
        seed: Seed of the moments and the victims.
        num_ranks: Number of ranks.
    """
    tally = Tally()
    steps = 2 * _MOST_STEPS * num_kills
    folder.mkdir(parents=True)
    undisturbed = ElasticJob(folder / "undisturbed", steps=steps, every=_EVERY, ranks=num_ranks)
    killed = None
    try:
        if undisturbed.wait() != [0]:
            raise RuntimeError(f"the undisturbed run failed: {undisturbed.errors()}")
        killed = ElasticJob(folder / "killed", steps=steps, every=_EVERY, ranks=num_ranks)
        _kill(killed, num_kills, num_ranks, random.Random(seed), tally)
        tally.require(killed.wait() == [0], "failed", killed.errors())
        kills = tally.counts["trials"]
        tally.require(kills == num_kills, "ended too early", f"after {kills} kills")
        _compare(undisturbed, killed, tally)
    finally:
        for job in (undisturbed, killed):
            if job is not None:
                job.close()
    shutil.rmtree(folder)
    return tally


def _kill(
    job: ElasticJob, num_kills: int, num_ranks: int, chooser: random.Random, tally: Tally
) -> None:
    """Kill ranks until there were so many kills, or the job has ended."""
    terms = 0
    while tally.counts["trials"] < num_kills:
        when = chooser.choices([*_MOMENTS_S], [3, 5, 2])[0]
        if when != "any" and not job.until(lambda _: _has_started_again(job)):
            break
        if when == "training":
            for _ in range(chooser.randint(1, _MOST_STEPS)):
                job.until(lambda line: line.startswith("step "))
        time.sleep(chooser.uniform(0, _MOMENTS_S[when]))
        victims = chooser.choice([[chooser.randrange(num_ranks)], [*range(num_ranks)]])
        is_term = terms < tally.counts["trials"] // 4
        num = job.kill(victims, signal.SIGTERM if is_term else signal.SIGKILL)
        if not num:
            tally.counts["nobody was there"] += 1
        elif is_term:
            terms += 1
            tally.counts["ended by SIGTERM"] += 1
        else:
            tally.counts["trials"] += 1
            tally.counts[f"kills: {when}"] += 1
            tally.counts["kills of all ranks"] += num == num_ranks


def _has_started_again(job: ElasticJob) -> bool:
    """Return whether the newest start is of ranks that nobody has killed yet."""
    starts = job.starts()
    return bool(starts) and starts[-1][0] > max(job.killed, default=-1)


def _compare(undisturbed: ElasticJob, killed: ElasticJob, tally: Tally) -> None:
    """Compare the whole run, from its first line to its last checkpoint."""
    expected, found = undisturbed.losses(), killed.losses()
    tally.require(expected.keys() == found.keys(), "steps", f"{sorted(found)}")
    for step, losses in found.items():
        tally.counts["losses compared"] += 1
        tally.require(losses == expected.get(step), "other losses", f"step {step}: {losses}")
    (values, problems), (other_values, other_problems) = (
        contents(job.directory) for job in (undisturbed, killed)
    )
    tally.require(values.keys() == other_values.keys(), "other values", f"{[*other_values]}")
    for name, value in values.items():
        tally.counts["bits compared"] += 1
        tally.require(value == other_values.get(name), "other bits", name)
    tally.counts["checkpoints verified"] += 2
    tally.require(not [*problems, *other_problems], "damaged", f"{problems} {other_problems}")
    tally.counts["restarts"] = len(killed.starts()) - 1
    tally.counts["resumed"] = sum(step is not None for _, _, step in killed.starts())
    for lost in killed.lost():
        tally.require(found=False, name="lost", problem=lost)
