"""Ranks that close, cannot begin, go back to a checkpoint, or end without waiting for a seal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks_training.cases import (
    BEGIN,
    ROUND,
    Calls,
    Case,
    do,
    errors,
    in_memory,
    of_each,
    require_success,
    run_all,
    run_cases,
    values,
)
from tests.ranks_training.rank_server import Jobs

RANKS_ERRORS = ("RanksError", "OutOfStepError")
"""The class, and one of its own classes."""

ATTEMPT: Calls = [["backward"], ["attempt"]]
LEFT: dict[str, tuple[str, int, Calls, tuple[str, ...]]] = {
    # Kind, rank that has closed, calls of the other one, and the error of the last of them.
    "step-1": ("ddp", 1, ATTEMPT, RANKS_ERRORS),
    "pin": ("fsdp2", 0, [["pin", "best"]], RANKS_ERRORS),
    "checkpoint-0": ("fsdp2", 0, [["step"], *ROUND[1:]], ("InDoubtError",)),
    "checkpoint-1": ("fsdp2", 1, [["step"], *ROUND[1:]], ("SealError",)),
}


def test_a_rank_that_has_closed_is_named_by_the_next_call(jobs: Jobs, tmp_path: Path) -> None:
    cases: dict[str, Case] = {}
    for name, (kind, leaver, after, _) in LEFT.items():
        begin, rest = BEGIN, after
        if after[0] == ["step"]:
            begin, rest = [*BEGIN, ["step"]], after[1:]
        calls: list[Calls] = [[*begin, ["await_file", "closed"], *rest, ["touch", "done"]]] * 2
        calls[leaver] = [*begin, ["close"], ["touch", "closed"], ["await_file", "done"]]
        cases[name] = (calls, {"kind": kind})
    played = run_cases(jobs, tmp_path, cases, given=True)
    for name, (_, leaver, after, expected) in LEFT.items():
        ranks = played[name]
        assert ranks[leaver].failed() == []
        found = ranks[1 - leaver].of(after[-1][0])
        assert found["error"] in expected, (name, found)
        assert f"rank {leaver} has closed its optimizer" in found["message"]


def test_a_rank_that_closes_is_named_by_a_step_that_waits_for_it(
    jobs: Jobs, tmp_path: Path
) -> None:
    """The step has a slot, so the ranks wait in a collective of torch."""
    before: Calls = [*BEGIN, ["step"], ["backward"]]
    waits: Calls = [*before, ["touch", "begun"], ["attempt"], ["attempt"], ["touch", "done"]]
    closes: Calls = [*before, ["await_file", "begun"], ["sleep", 0.5], ["close"]]
    calls = [waits, [*closes, ["await_file", "done"]]]
    first, _ = run_cases(jobs, tmp_path, {"": (calls, {})}, given=True)[""]
    assert first.failed() == ["RanksError"] * 2
    said, again = [one["message"] for one in errors(first)]
    assert said == "step(): rank 1 has closed its optimizer. Restart the job"
    assert again.startswith("step(): rank")


def test_a_constructor_that_fails_on_one_rank_fails_on_all_and_leaves_no_thread(
    jobs: Jobs, tmp_path: Path
) -> None:
    """The error is kept, with all that it refers to."""
    pins = ["fail", "stat", "/pins"]
    after: Calls = [["keep_error", "open"], do("odd_calls:threads")]
    differs = ["keep_error", *do("odd_calls:open_otherwise", "layer")]
    cases: dict[str, Case] = {
        "other models": ([[differs, after[1]], after], {}),
        "pins": ([[*BEGIN, ["close"], pins, *after], [*BEGIN, ["close"], *after]], {}),
    }
    for name, ranks in run_cases(jobs, tmp_path, cases, given=True).items():
        assert all(of_each(ranks, "keep_error")), name
        assert of_each(ranks, "do") == [[], []], name


def test_a_restore_and_more_steps_in_one_process_and_what_each_rank_lists(
    jobs: Jobs, tmp_path: Path
) -> None:
    """The writer goes on with the layout that it has, and every other rank with one it has read.

    A checkpoint whose slot is given out again is in the list of no rank.
    """
    back: Calls = [["step"], ["restore"], ["bits"]]
    calls: Calls = [["open"], *ROUND, *back, *ROUND, *ROUND, ["step"], *back, ["step"]]
    listed: Calls = [["open", {"keep": 1}], do("odd_calls:listed_while_pins_move", 5)]
    cases: dict[str, Case] = {}
    for kind in ("ddp", "fsdp2"):
        cases[f"memory-{kind}"] = in_memory(5, kind=kind)
        cases[kind] = ([calls] * 2, {"kind": kind})
        cases[f"listed-{kind}"] = ([listed] * 2, {"kind": kind})
    played = run_cases(jobs, tmp_path, cases)
    for kind in ("ddp", "fsdp2"):
        require_success(played[kind])
        require_success(played[f"listed-{kind}"])
        for plain, rank in zip(played[f"memory-{kind}"], played[kind], strict=True):
            expected = values(plain, "step")
            bits = [one["value"] for one in rank.outcomes if one["call"] in ("step", "bits")]
            assert bits == [expected[step - 1] for step in (1, 2, 1, 2, 3, 4, 5, 3, 4)], kind
        assert of_each(played[f"listed-{kind}"], "do") == [[[], [1], [1, 2], [2, 3], [3, 4]]] * 2


@pytest.mark.parametrize("end", [[["destroy"]], [["leave"]]], ids=["destroy", "raise"])
def test_scripts_whose_last_call_is_checkpoint_have_sealed(
    jobs: Jobs, tmp_path: Path, end: list[list[Any]]
) -> None:
    """Nothing waits for the seal, and one rank has ended its script before the others do."""
    last: Calls = [["open"], ["step"], ["checkpoint"]]
    ranks = jobs.run(tmp_path, [[*last, ["sleep", 0.5]], [*last, *end]], kind="fsdp2")
    assert [bool(rank.status) for rank in ranks] == [False, end == [["leave"]]]
    assert [rank.failed() for rank in ranks] == [[], []]
    again: Calls = [["open"], ["restore"], ["bits"], ["verify"]]
    found = run_all(jobs, tmp_path, [again] * 2, kind="fsdp2")
    assert [step for step, _ in of_each(found, "restore")] == [1, 1]
    assert of_each(found, "bits") == of_each(ranks, "step")
    assert of_each(found, "verify") == [[], []]
