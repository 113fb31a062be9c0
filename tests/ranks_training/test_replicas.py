"""Parameters that several ranks hold and that differ are refused by name, and never mixed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks_training.rank_server import Jobs, Rank

Calls = list[list[Any]]
SEAL: Calls = [["checkpoint"], ["result"]]
STEP: Calls = [["backward"], ["update"]]
REFUSED: Calls = [["backward"], ["bits"], ["attempt"], ["bits"]]


def of(name: str, *arguments: Any) -> list[Any]:
    """Return a call of one of the functions of `tests.ranks_training.replicas`."""
    return ["do", f"tests.ranks_training.replicas:{name}", *arguments]


def run(jobs: Jobs, folder: Path, kind: str, calls: Calls, num: int = 2, **case: Any) -> list[Rank]:
    ranks = jobs.run(folder, [calls] * num, **{"kind": kind, "given": True, **case})
    assert [rank.status for rank in ranks] == [0] * num, [rank.errors[-3000:] for rank in ranks]
    return ranks


def refusals(rank: Rank) -> list[tuple[str, str, str]]:
    """Return each call that failed: its name, the error, and what follows "parameter"."""
    failed = [one for one in rank.outcomes if one["error"]]
    return [
        (one["call"], one["error"], one["message"].partition("parameter ")[2].partition(":")[0])
        for one in failed
    ]


def all_bits(rank: Rank) -> list[str]:
    return [one["value"] for one in rank.outcomes if one["call"] == "bits"]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_values_of_each_rank_are_refused_before_the_first_step(
    jobs: Jobs, tmp_path: Path, kind: str
) -> None:
    """Also before a checkpoint without a step; once they are equal, training goes on."""
    name, prefix = "layers.1.weight", "module." if kind == "ddp" else ""
    calls: Calls = [
        of("ignore", name), ["open"], *REFUSED, *SEAL, ["attempt"], of("fill", prefix + name, 2.0),
        ["update"], *SEAL, ["verify"],
    ]  # fmt: skip
    for rank in run(jobs, tmp_path, kind, calls):
        said = f"'{name}' has other values on rank 1 than on rank 0"
        assert refusals(rank) == [
            ("attempt", "RanksError", said),
            ("result", "SealError", said),
            ("attempt", "RanksError", said),
        ]
        before, after = all_bits(rank)
        assert before == after
        assert rank.of("result")["value"] == 1
        assert rank.of("verify")["value"] == []


def test_changes_of_one_rank_are_refused_and_those_of_all_are_not(
    jobs: Jobs, tmp_path: Path
) -> None:
    weight, both = "layers.0.weight", [0, 1]
    calls: Calls = [
        ["open"], *STEP, *SEAL,
        # A step refuses what one rank has changed; `restore` gives all ranks the same.
        of("change", weight, [1]), *REFUSED, ["restore"], *STEP, ["bits"], *SEAL,
        # A seal refuses also what torch has not counted, and so does the step after it.
        of("change", "frozen", [0], "data"), *STEP, *SEAL, ["backward"], ["attempt"],
        of("change", "frozen", [1], "data"), ["update"],
        of("change", "maybe.weight", [1]), *SEAL, of("change", "maybe.weight", [0]),
        # These are the same on all ranks.
        of("change", weight, both), *STEP, of("change", weight, both), *SEAL, *STEP,
        of("change", weight, [0], "broadcast"), *STEP, of("change", "frozen", both, "data"), *STEP,
        of("fill", f"module.{weight}", float("nan")), *STEP, *SEAL, ["verify"], ["bits"],
    ]  # fmt: skip
    ranks = run(jobs, tmp_path, "ddp", calls)
    said = "has other values on rank 1 than on rank 0"
    for rank in ranks:
        assert refusals(rank) == [
            ("attempt", "RanksError", f"'{weight}' {said}"),
            ("result", "SealError", f"'frozen' {said}"),
            ("attempt", "RanksError", f"'frozen' {said}"),
            ("result", "SealError", f"'maybe.weight' {said}"),
        ]
        before, after = all_bits(rank)[:2]
        assert before == after
        assert rank.of("result")["value"] == 9
        assert rank.of("verify")["value"] == []
    first, second = (all_bits(rank) for rank in ranks)
    assert first[2:] == second[2:]


@pytest.mark.parametrize("kind", ["hybrid", "grid"])
def test_shards_that_are_replicated_are_compared_where_they_are_held(
    jobs: Jobs, tmp_path: Path, kind: str
) -> None:
    name = "layers.0.weight" if kind == "hybrid" else "maybe.weight"
    change = of("change", name, [3])
    calls: Calls = [
        ["open"], *STEP, *SEAL, *STEP, change, ["backward"], ["attempt"], *SEAL, ["restore"],
        of("change", name, [0, 1, 2, 3]), *STEP, *SEAL, ["verify"],
    ]  # fmt: skip
    ranks = run(jobs, tmp_path, kind, calls, 4, widths=[6, 8, 4])
    other = 1 if kind == "hybrid" else 2
    said = f"'{name}' has other values on rank 3 than on rank {other}"
    for rank in ranks:
        assert refusals(rank) == [("attempt", "RanksError", said), ("result", "SealError", said)]
        assert rank.of("result")["value"] == 2
        assert rank.of("verify")["value"] == []


def test_another_order_without_model_is_refused(jobs: Jobs, tmp_path: Path) -> None:
    for rank in run(jobs, tmp_path, "ddp", [of("open_reversed"), ["backward"], ["attempt"]]):
        (failed,) = [one for one in rank.outcomes if one["error"]]
        assert "'group0.param0' (one of 2 parameters) has other values on" in failed["message"]
        assert "in the same order" in failed["message"]


def test_parameters_of_one_rank_have_an_optimizer_of_their_own(jobs: Jobs, tmp_path: Path) -> None:
    name = "layers.1.weight"
    calls: Calls = [of("ignore", name), of("open_two", name), of("step_two"), *SEAL, ["verify"]]
    for rank in run(jobs, tmp_path, "ddp", calls, given=False):
        assert refusals(rank) == []
        assert rank.of("do")["value"] == 0.0
        assert rank.of("verify")["value"] == []
