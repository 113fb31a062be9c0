"""Ranks are killed at steps of a re-cut; the campaign `bench/ranks_campaign.py` has all steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench._ranks_reshape import CHANGES, Change, KilledRecuts
from tests.limits import AGREEMENT_S
from tests.ranks_training.rank_server import Jobs

DRIVES = ("a", "b")


@pytest.mark.parametrize(
    "change",
    [*CHANGES, Change(2, "fsdp2", 1, "one", DRIVES), Change(1, "one", 2, "ddp", DRIVES)],
    ids=lambda change: change.label,
)
def test_nothing_is_lost_when_ranks_are_killed_in_a_re_cut(
    jobs: Jobs, tmp_path: Path, change: Change
) -> None:
    """Two steps, each with other victims, and either number of ranks goes on."""
    killed = KilledRecuts(jobs, tmp_path / "all", change, AGREEMENT_S)
    steps = killed.labels()
    # One process that finds all in its directories changes nothing before its first step.
    for phase in ("open", "restore", "step", "seal")[2 * (change.after == 1) :]:
        assert any(label.startswith(f"{phase}: ") for _, label in steps), phase
    withdrawn = f"seal: rename {change.directories[0]}/step-N"
    assert any(label == withdrawn for _, label in steps), "withdrawn at the end"
    chosen = steps[len(steps) // 3 :: len(steps) // 3][:2]
    for number, (rank, label) in enumerate(chosen):
        victims = killed.victims()[number % len(killed.victims())]
        killed.kill_at(rank, label, victims, goes_back=number % 2 == 1)
    assert killed.tally.problems == []
    assert killed.tally.counts["trials"] == killed.tally.counts["resumed"] == len(chosen)
