"""Ranks are killed at steps of a re-cut; the campaign `bench/ranks_campaign.py` has all steps."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from bench._ranks_reshape import CHANGES, Change, KilledRecuts
from tests.limits import AGREEMENT_S
from tests.ranks_training.rank_server import Jobs


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.label)
def test_nothing_is_lost_when_ranks_are_killed_in_a_re_cut(
    jobs: Jobs, tmp_path: Path, change: Change
) -> None:
    """A few steps of each phase, each with other victims, and either number of ranks goes on."""
    killed = KilledRecuts(jobs, tmp_path / "all", change, AGREEMENT_S)
    steps = killed.labels()
    for phase in ("open", "restore", "step", "seal"):
        assert any(label.startswith(f"{phase}: ") for _, label in steps), phase
    assert any(label == "seal: rename run/step-N" for _, label in steps), "withdrawn at the end"
    chosen = steps[5 :: len(steps) // 4]
    for number, (rank, label) in enumerate(chosen):
        victims = killed.victims()[number % 3]
        killed.kill_at(rank, label, victims, goes_back=number % 2 == 1)
    assert killed.tally.problems == []
    assert killed.tally.counts["trials"] == killed.tally.counts["resumed"] == len(chosen)


def test_a_campaign_of_re_cuts_notices_what_is_lost(jobs: Jobs, tmp_path: Path) -> None:
    killed = KilledRecuts(jobs, tmp_path / "all", CHANGES[0], AGREEMENT_S)
    shutil.rmtree(tmp_path / "all/prepared/run/step-00000003")
    killed._values[2] = {}
    killed.kill_at(1, "restore: put exchange/ask", (1,), goes_back=False)
    assert [problem.partition(":")[0] for problem in killed.tally.problems] == [
        "lost", "other bits", "other bits",
    ]  # fmt: skip
