"""Ranks that make different calls raise a named error in time, and lose no checkpoint."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.limits import UNREACHED_AGREEMENT_S, UNREACHED_S
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
    ranks = jobs.run(folder, [BEGIN + first, BEGIN + second], kind=kind)
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
    alone: list[list[Any]] = [["hurry"], ["checkpoint"], ["result"], ["touch", "told"]]
    first, second = differ(
        jobs, tmp_path, kind, [["step"], *alone], [["step"], ["await_file", "told"]]
    )
    assert first.failed() == ["SealError"]
    assert "rank 1 did not call checkpoint()" in first.of("result")["message"]
    assert second.failed() == []
    require_goes_on(jobs, tmp_path, kind, 1)


APART: dict[str, tuple[list[list[Any]], list[list[Any]], str]] = {
    # Calls of rank 0 and of rank 1, and what both say.
    "checkpoint-step": (
        [["checkpoint"], ["backward"], ["attempt"], ["keep_error", "result"]],
        [["backward"], ["attempt"], ["keep_error", "checkpoint"]],
        "rank 0 is in checkpoint(), rank 1 in step(): call checkpoint() on every rank",
    ),
    "step-checkpoint": (
        [["backward"], ["attempt"], ["keep_error", "checkpoint"]],
        [["checkpoint"], ["backward"], ["attempt"]],
        "rank 0 is in step(), rank 1 in checkpoint(): call checkpoint() on every rank",
    ),
    "checkpoint-restore": (
        [["checkpoint"], ["result"]],
        [["restore"], ["keep_error", "pin", "best"]],
        "rank 0 is in checkpoint(), rank 1 in restore(): call checkpoint() on every",
    ),
    "restore-step": (
        [["restore"]],
        [["backward"], ["attempt"]],
        "rank 0 is in restore(), rank 1 in step(): make the same calls in the same",
    ),
    "step-load": (
        [["backward"], ["attempt"]],
        [["load", "reference"]],
        "rank 0 is in step(), rank 1 in load_state_dict(): make the same calls",
    ),
    "checkpoint-twice": (
        [["checkpoint"], ["checkpoint"]],
        [["checkpoint"], ["backward"], ["attempt"]],
        "rank 1 called step() while rank 0 called checkpoint(): make the same calls",
    ),
}


@pytest.mark.parametrize("case", APART)
def test_ranks_in_different_calls_say_so_at_once(jobs: Jobs, tmp_path: Path, case: str) -> None:
    """Each process stays until the other one has ended its calls; none waits for the limit."""
    first, second, said = APART[case]
    calls = [
        [*BEGIN, ["step"], *own, ["touch", f"done-{rank}"], ["await_file", f"done-{1 - rank}"]]
        for rank, own in enumerate((first, second))
    ]
    setting = {"given": True, "timeout_s": UNREACHED_AGREEMENT_S}
    ranks = jobs.start(tmp_path, calls, kind="ddp", **setting).wait(UNREACHED_S)
    assert [rank.status for rank in ranks] == [0, 0], [rank.errors for rank in ranks]
    for rank in ranks:
        (text,) = {one["message"] for one in rank.outcomes if one["error"]}
        assert said in re.sub(r"(rank \d) on \S+", r"\1", text)
        assert all(one["value"] for one in rank.outcomes if one["call"] == "keep_error")
    require_goes_on(jobs, tmp_path, "ddp", 2 if case == "checkpoint-twice" else 1)


def test_shards_are_not_stepped_past_a_checkpoint_of_another_rank(
    jobs: Jobs, tmp_path: Path
) -> None:
    """With FSDP2 no rank waits for another one in a step."""
    own: list[list[Any]] = [["checkpoint"], ["touch", "begun"], ["result"], ["touch", "done"]]
    other: list[list[Any]] = [["await_file", "begun"], ["backward"], ["attempt"]]
    calls = [[*BEGIN, ["step"], *own], [*BEGIN, ["step"], *other, ["await_file", "done"]]]
    setting = {"given": True, "timeout_s": UNREACHED_AGREEMENT_S}
    ranks = jobs.start(tmp_path, calls, kind="fsdp2", **setting).wait(UNREACHED_S)
    assert [rank.failed() for rank in ranks] == [["SealError"], ["OutOfStepError"]]
    for rank in ranks:
        assert rank.status == 0
        (text,) = [one["message"] for one in rank.outcomes if one["error"]]
        assert "in step(): call checkpoint() on every rank" in text
    require_goes_on(jobs, tmp_path, "fsdp2", 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_rank_costs_no_checkpoint(jobs: Jobs, tmp_path: Path, kind: str) -> None:
    first, second = jobs.run(tmp_path, [[*BEGIN, ["step"]], [*BEGIN, ["kill"]]], kind=kind)
    assert (first.status, second.status) == (0, -9)
    assert first.failed() == ["RuntimeError"], "the backward of torch finds out"
    require_goes_on(jobs, tmp_path, kind, 1)
