"""FSDP2 with steps beside the forward: the bits of training in memory, and the step is hidden."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks_training.beside_calls import Call, run
from tests.ranks_training.rank_server import Jobs

SAME_BITS: dict[str, tuple[int, list[dict[str, Any]]]] = {
    "blocks, layers, all at once": (2, [{}, {"wrap": "layer"}, {"wrap": "root"}]),
    "uneven, gathered ahead, accumulated, clipped": (
        3,
        [
            {"prefetch": 2, "accumulate": 2, "clip": 0.1},
            {"wrap": "pair", "made": "between", "prefetch": 1},
        ],
    ),
    "kept gathered, mixed precision, a scaler that skips": (
        3,
        [
            {"wrap": "layer", "mixed": True, "reshard": False, "infinite": 2},
            {"reshard": True, "hyper": {"lr": 0.1, "momentum": 0.9}, "optimizer": "SGD"},
        ],
    ),
    "evaluated between steps": (
        2,
        [{"evaluates": True}, {"evaluates": True, "mixed": True, "reshard": False}],
    ),
}


@pytest.mark.parametrize(("num_ranks", "cases"), SAME_BITS.values(), ids=SAME_BITS)
def test_the_bits_are_those_of_training_in_memory(
    jobs: Jobs, tmp_path: Path, num_ranks: int, cases: list[dict[str, Any]]
) -> None:
    for found in run(jobs, tmp_path, num_ranks, [("compare", case) for case in cases]):
        assert [rank["different"] for rank in found] == [[]] * num_ranks


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_each_step_is_sealed_at_once_and_resumed(
    jobs: Jobs, tmp_path: Path, num_ranks: int
) -> None:
    case = {"seals": True, "evaluates": num_ranks == 2}
    (found,) = run(jobs, tmp_path, num_ranks, [("compare", {**case, "last": 3})])
    assert [rank["sealed"] for rank in found] == [[1, 2, 3]] * num_ranks
    assert [rank["different"] for rank in found] == [[]] * num_ranks
    (found,) = run(jobs, tmp_path, num_ranks, [("compare", {**case, "first": 4, "last": 6})])
    for number, rank in enumerate(found):
        assert rank["resumed"] == [3, {"step": 3, "rank": number}]
        assert rank["different"] == []


def test_the_forward_begins_while_the_step_goes_on(jobs: Jobs, tmp_path: Path) -> None:
    """The chunk that is needed last is held back until the first block has run."""
    calls: list[Call] = [("hidden", {}), ("hidden", {"wrap": "layer"}), ("hidden", {"prefetch": 1})]
    for found in run(jobs, tmp_path, 2, calls):
        assert found == [{"different": [], "ran while the step went on": True}] * 2


def test_whoever_reads_a_sharded_parameter_waits_for_it(jobs: Jobs, tmp_path: Path) -> None:
    (found,) = run(jobs, tmp_path, 2, [("readers", {})])
    assert found == [{"different": []}] * 2


def test_a_checkpoint_that_some_ranks_ask_for_after_the_step_and_some_amid_it(
    jobs: Jobs, tmp_path: Path
) -> None:
    calls: list[Call] = [("sealed_apart", {"fails": False}), ("sealed_apart", {"fails": True})]
    after, failed = run(jobs, tmp_path, 2, calls)
    assert [rank["held"] for rank in after] == [True, False]
    assert [rank["errors"] for rank in after] == [[], []]
    assert [[len(rank["errors"]), rank["held"]] for rank in failed] == [[1, False]] * 2
    assert all("sealing step 3 failed" in rank["errors"][0] for rank in failed)
    for rank in (*after, *failed):
        assert rank["sealed"] == 4
        assert rank["different"] == []


def test_a_step_that_fails_on_one_rank_and_a_close_amid_a_step(jobs: Jobs, tmp_path: Path) -> None:
    torn, closed = run(jobs, tmp_path, 2, [("torn", {"failing": 1}), ("closed", {})])
    assert [rank["error"].split(":")[0] for rank in torn] == ["", "StorageError"]
    assert [(rank["restored"], rank["different"]) for rank in torn] == [(2, [])] * 2
    assert [rank["sealed"] for rank in torn] == [4, 4]
    assert closed == [{"restored": 4, "different": []}] * 2


@pytest.mark.parametrize("then", ["checkpoint", "checkpoint amid", "pin"])
def test_a_call_after_a_step_that_failed_on_one_rank_fails_on_all(
    jobs: Jobs, tmp_path: Path, then: str
) -> None:
    """FSDP2 sends nothing in a step, so the other ranks learn of it in this call."""
    (torn,) = run(jobs, tmp_path, 2, [("torn", {"failing": 1, "then": then})])
    assert all("injected" in rank["error"] for rank in torn), torn
    assert [(rank["restored"], rank["different"]) for rank in torn] == [(2, [])] * 2
    assert [rank["sealed"] for rank in torn] == [4, 4]
