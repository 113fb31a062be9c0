"""Ranks that make different calls raise a named error in time, and lose no checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks_training.rank_server import Jobs, Rank

KINDS = ("ddp", "fsdp2")
BEGIN: list[list[Any]] = [["open"], ["step"], ["checkpoint"], ["result"]]
AGAIN: list[list[Any]] = [["open"], ["restore"], ["step"], ["checkpoint"], ["result"]]


def require_goes_on(jobs: Jobs, folder: Path, kind: str, step: int) -> None:
    """Check that all ranks resume a step, and take and seal the next one."""
    for number, rank in enumerate(jobs.run(folder, [AGAIN, AGAIN], kind=kind)):
        assert rank.has_come_to_its_end, rank.errors
        assert rank.failed() == []
        assert rank.of("restore")["value"] == [step, {"step": step, "rank": number}]
        assert rank.of("result")["value"] == step + 1


def differ(
    jobs: Jobs, folder: Path, kind: str, first: list[list[Any]], second: list[list[Any]]
) -> list[Rank]:
    """Run two ranks that make different calls after a checkpoint; both must end."""
    ranks = jobs.run(folder, [BEGIN + first, BEGIN + second], kind=kind, timeout_s=4.0)
    assert [rank.status for rank in ranks] == [0, 0], [rank.errors for rank in ranks]
    return ranks


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_restore_the_same_checkpoint_or_none(jobs: Jobs, tmp_path: Path, kind: str) -> None:
    seal: list[list[Any]] = [["step"], ["checkpoint"], ["result"]]
    older = [*seal, ["restore", 1, {"discard_newer": True}]]
    for rank in differ(jobs, tmp_path, kind, older, [*seal, ["restore"]]):
        assert rank.failed() == ["RanksError"]
        assert "step-00000001 and rank 1 for" in rank.of("restore")["message"]
    require_goes_on(jobs, tmp_path, kind, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_hyper_parameters_that_differ_fail_the_seal(jobs: Jobs, tmp_path: Path, kind: str) -> None:
    seal: list[list[Any]] = [["step"], ["checkpoint"], ["result"]]
    for rank in differ(jobs, tmp_path, kind, seal, [["set", {"lr": 1e-3}], *seal]):
        assert rank.failed() == ["SealError"]
        assert "rank 1 differs from rank 0 in the hyper-parameters" in rank.of("result")["message"]
    require_goes_on(jobs, tmp_path, kind, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_one_rank_only_is_none(jobs: Jobs, tmp_path: Path, kind: str) -> None:
    first, second = differ(
        jobs, tmp_path, kind, [["step"], ["checkpoint"], ["result"]], [["step"], ["sleep", 5.0]]
    )
    assert first.failed() == ["SealError"]
    assert "rank 1 did not call checkpoint()" in first.of("result")["message"]
    assert second.failed() == []
    require_goes_on(jobs, tmp_path, kind, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_rank_costs_no_checkpoint(jobs: Jobs, tmp_path: Path, kind: str) -> None:
    first, second = jobs.run(
        tmp_path, [[*BEGIN, ["step"]], [*BEGIN, ["kill"]]], kind=kind, timeout_s=4.0
    )
    assert (first.status, second.status) == (0, -9)
    assert first.failed() == ["RuntimeError"], "the backward of torch finds out"
    require_goes_on(jobs, tmp_path, kind, 1)
