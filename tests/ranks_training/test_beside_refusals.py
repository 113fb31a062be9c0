"""What one rank alone refuses beside the forward is an error on all ranks, and training goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks_training.beside_calls import Call, run
from tests.ranks_training.rank_server import Jobs

DDP: dict[str, Any] = {"wrap": "ddp"}


def both(name: str, wraps: list[dict[str, Any]], **how: Any) -> list[Call]:
    return [(name, {**wrap, **how}) for wrap in wraps]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_step_that_one_rank_refuses_is_taken_by_none(
    jobs: Jobs, tmp_path: Path, victim: int
) -> None:
    """FSDP2 exchanges nothing in a step, but for the slot of the first step after a checkpoint."""
    calls = [
        *both("refused_step", [DDP], victim=victim, sealed=False),
        *both("refused_step", [DDP, {}], victim=victim, sealed=True),
    ]
    for found in run(jobs, tmp_path, 2, calls, "beside_refusals"):
        for number, rank in enumerate(found):
            assert "sparse" in rank["error"].lower(), rank
            if number != victim:
                assert rank["error"].startswith("RanksError: ")
                assert f"rank {victim}" in rank["error"]
            assert (rank["sealed"], rank["different"]) == (3, [])


@pytest.mark.parametrize("victim", [0, 1])
def test_a_metric_that_one_rank_refuses_amid_a_step_fails_the_checkpoint_on_all(
    jobs: Jobs, tmp_path: Path, victim: int
) -> None:
    bad = {"train_state": {"what": "a generator"}, "metrics": {"loss": "a text"}}
    calls = both("refused_content", [DDP, {}], victim=victim, bad=bad)
    for found in run(jobs, tmp_path, 2, calls, "beside_refusals"):
        for rank in found:
            assert "a text" in rank["error"], rank
            assert rank["error"].startswith("SealError: sealing step 3 failed"), rank
            assert f"rank {victim}" in rank["error"]
            assert (rank["sealed"], rank["different"]) == (4, [])


def test_a_seal_that_cannot_begin_on_one_rank_at_the_end_of_a_step_fails_on_all(
    jobs: Jobs, tmp_path: Path
) -> None:
    """The error that `result` has raised on all ranks is in the way of no later call."""
    calls = both("refused_seal", [DDP, {}], victim=1)
    for found in run(jobs, tmp_path, 2, calls, "beside_refusals"):
        for rank in found:
            assert "injected" in rank["error"], rank
            assert rank["error"].startswith("SealError: "), rank
            assert rank["then"] == ["", ""]
            assert (rank["sealed"], rank["different"]) == (4, [])
