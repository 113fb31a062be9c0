"""A rank that closes its optimizer, or cannot make it, is named by the others at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.limits import UNREACHED_AGREEMENT_S, UNREACHED_S
from tests.ranks_training.rank_server import Jobs, Rank

RANKS_ERRORS = ("RanksError", "OutOfStepError")
"""The class, and one of its own classes."""

Calls = list[list[Any]]
SEAL: Calls = [["step"], ["checkpoint"], ["result"]]
BEGIN: Calls = [["open"], *SEAL]


def run(jobs: Jobs, folder: Path, kind: str, *calls: Calls) -> list[Rank]:
    """Run ranks, none of which may wait for the limit."""
    job = jobs.start(folder, [*calls], kind=kind, given=True, timeout_s=UNREACHED_AGREEMENT_S)
    ranks = job.wait(UNREACHED_S)
    assert [rank.status for rank in ranks] == [0] * len(calls), [
        rank.errors[-3000:] for rank in ranks
    ]
    return ranks


def leave(
    jobs: Jobs, folder: Path, kind: str, leaver: int, before: Calls, calls: Calls
) -> list[dict[str, Any]]:
    """Close one of three ranks, whose process goes on; return how the last call of others ended."""
    others = [rank for rank in range(3) if rank != leaver]
    own = [*before, ["close"], ["touch", "closed"]]
    own += [["await_file", f"done-{rank}"] for rank in others]
    made: list[Calls] = [
        [*before, ["await_file", "closed"], *calls, ["touch", f"done-{rank}"]] for rank in range(3)
    ]
    made[leaver] = own
    ranks = run(jobs, folder, kind, *made)
    assert ranks[leaver].failed() == []
    return [ranks[rank].of(calls[-1][0]) for rank in others]


@pytest.mark.parametrize("leaver", [0, 2])
@pytest.mark.parametrize(
    ("kind", "call"),
    [
        ("ddp", ["attempt"]),
        ("ddp", ["restore"]),
        ("fsdp2", ["pin", "best"]),
    ],
)
def test_a_rank_that_has_closed_is_named_by_the_next_call(
    jobs: Jobs, tmp_path: Path, kind: str, call: list[Any], leaver: int
) -> None:
    calls = [["backward"], call] if call == ["attempt"] else [call]
    for found in leave(jobs, tmp_path, kind, leaver, BEGIN, calls):
        assert found["error"] in RANKS_ERRORS
        assert f"rank {leaver} has closed its optimizer" in found["message"]


@pytest.mark.parametrize(("leaver", "error"), [(0, "InDoubtError"), (1, "SealError")])
def test_a_rank_that_has_closed_is_named_by_a_checkpoint(
    jobs: Jobs, tmp_path: Path, leaver: int, error: str
) -> None:
    before: Calls = [*BEGIN, ["step"]]
    calls: Calls = [["checkpoint"], ["result"]]
    for found in leave(jobs, tmp_path, "fsdp2", leaver, before, calls):
        assert found["error"] == error
        assert f"rank {leaver} has closed its optimizer" in found["message"]


def test_a_rank_that_closes_is_named_by_a_step_that_waits_for_it(
    jobs: Jobs, tmp_path: Path
) -> None:
    """The step has a slot, so the ranks wait in a collective of torch."""
    before: Calls = [*BEGIN, ["step"], ["backward"]]
    waits: list[Calls] = [
        [*before, ["touch", f"begun-{rank}"], ["attempt"], ["attempt"], ["touch", f"done-{rank}"]]
        for rank in (0, 2)
    ]
    files = [["await_file", f"begun-{rank}"] for rank in (0, 2)]
    ends = [["await_file", f"done-{rank}"] for rank in (0, 2)]
    closes: Calls = [*before, *files, ["sleep", 0.5], ["close"], *ends]
    first, _, last = run(jobs, tmp_path, "ddp", waits[0], closes, waits[1])
    for rank in (first, last):
        assert rank.failed() == ["RanksError"] * 2
        said, again = [one["message"] for one in rank.outcomes if one["error"]]
        assert said == "step(): rank 1 has closed its optimizer. Restart the job"
        assert again.startswith("step(): rank")


def test_a_constructor_that_fails_on_one_rank_fails_on_all(jobs: Jobs, tmp_path: Path) -> None:
    fails = ["do", "tests.ranks_training.leaving:fail_alone"]
    first, second = run(jobs, tmp_path, "ddp", [["open"], *BEGIN], [fails, ["open"], *BEGIN])
    own, other = second.outcomes[1], first.outcomes[0]
    assert (own["error"], own["message"]) == ("OSError", "injected before an exchange")
    assert other["error"] in RANKS_ERRORS
    assert "rank 1 could not make the optimizer: injected before an exchange" in other["message"]
    assert [rank.of("result")["value"] for rank in (first, second)] == [1, 1]


def test_rank_0_stays_until_all_have_read_how_the_last_exchange_has_ended(
    jobs: Jobs, tmp_path: Path
) -> None:
    """Its process serves the key-value store."""
    late = ["do", "tests.ranks_training.leaving:read_late"]
    ends: Calls = [["open"], ["restore"], ["close"], ["kill"]]
    job = jobs.start(tmp_path, [ends, [["open"], [*late, 0.5], *ends[1:]]], kind="ddp", given=True)
    for rank in job.wait(UNREACHED_S):
        assert [one["call"] for one in rank.outcomes if one["call"] != "do"] == [
            one[0] for one in ends[:-1]
        ]
        assert rank.failed() == []


@pytest.mark.parametrize(
    ("before", "broken"),
    [
        ([], ["freeze"]),
        ([*BEGIN, ["close"]], ["fail", "stat", "/pins"]),
        ([], ["do", "tests.ranks_training.leaving:fail_alone"]),
    ],
    ids=["other-models", "unreadable-pins", "alone"],
)
def test_a_constructor_that_fails_leaves_no_thread(
    jobs: Jobs, tmp_path: Path, before: Calls, broken: list[Any]
) -> None:
    """The error is kept, with all that it refers to."""
    after: Calls = [["keep_error", "open"], ["do", "tests.ranks_training.leaving:threads"]]
    for rank in run(jobs, tmp_path, "ddp", [*before, broken, *after], [*before, *after]):
        assert rank.of("keep_error")["value"]
        assert rank.of("do")["value"] == []
