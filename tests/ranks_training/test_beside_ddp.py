"""Ranks that hold the same parameters, with steps beside the forward: DDP, and HSDP of FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks_training.beside_calls import Call, run
from tests.ranks_training.rank_server import Jobs

DDP: dict[str, Any] = {"wrap": "ddp"}

SAME_BITS: dict[str, tuple[int, list[dict[str, Any]]]] = {
    "clipped, accumulated, small": (2, [DDP | {"accumulate": 2, "clip": 0.1, "hidden": 5}]),
    "many chunks, evaluated between steps": (
        3,
        [DDP | {"evaluates": True, "hidden": 192}, DDP | {"hidden": 192, "span": 512}],
    ),
    "a scaler that skips, another optimizer": (
        3,
        [
            DDP | {"infinite": 2},
            DDP | {"optimizer": "SGD", "hyper": {"lr": 0.1, "momentum": 0.9}, "hidden": 192},
        ],
    ),
    "HSDP": (4, [{"wrap": "hsdp", "hidden": 192, "evaluates": True}]),
}


@pytest.mark.parametrize(("num_ranks", "cases"), SAME_BITS.values(), ids=SAME_BITS)
def test_the_bits_are_those_of_training_in_memory(
    jobs: Jobs, tmp_path: Path, num_ranks: int, cases: list[dict[str, Any]]
) -> None:
    for found in run(jobs, tmp_path, num_ranks, [("compare", case) for case in cases]):
        assert [rank["different"] for rank in found] == [[]] * num_ranks


def test_each_step_is_sealed_at_once_and_resumed(jobs: Jobs, tmp_path: Path) -> None:
    case = DDP | {"seals": True, "hidden": 192}
    (found,) = run(jobs, tmp_path, 2, [("compare", {**case, "last": 3})])
    assert [rank["sealed"] for rank in found] == [[1, 2, 3]] * 2
    assert [rank["different"] for rank in found] == [[]] * 2
    (found,) = run(jobs, tmp_path, 2, [("compare", {**case, "first": 4, "last": 5})])
    for number, rank in enumerate(found):
        assert rank["resumed"] == [3, {"step": 3, "rank": number}]
        assert rank["different"] == []


def test_values_of_other_ranks_arrive_while_the_step_goes_on(jobs: Jobs, tmp_path: Path) -> None:
    """The last rank holds back its last chunk until the first block has run on all ranks.

    If the model is dealt in several spans, all ranks do, until all blocks but the last have run.
    """
    spans = DDP | {"span": 512, "block": 1}
    calls: list[Call] = [("hidden", DDP), ("hidden", spans), ("readers", DDP)]
    hidden, in_spans, readers = run(jobs, tmp_path, 2, calls)
    assert hidden == [{"different": [], "ran while the step went on": True}] * 2
    assert in_spans == hidden
    assert readers == [{"different": []}] * 2


def test_a_checkpoint_that_some_ranks_ask_for_after_the_step_and_some_amid_it(
    jobs: Jobs, tmp_path: Path
) -> None:
    (found,) = run(jobs, tmp_path, 2, [("sealed_apart", DDP | {"fails": True})])
    for rank in found:
        assert "sealing step 3 failed" in rank["errors"][0]
        assert rank["sealed"] == 4
        assert rank["different"] == []


@pytest.mark.parametrize("failing", [0, 1])
def test_a_step_that_fails_on_one_rank_fails_on_all_with_the_same_error(
    jobs: Jobs, tmp_path: Path, failing: int
) -> None:
    torn, closed = run(jobs, tmp_path, 2, [("torn", DDP | {"failing": failing}), ("closed", DDP)])
    for rank in torn:
        assert rank["error"].startswith(f"RanksError: rank {failing} of 2 failed in the middle of")
        assert "StorageError: state: injected" in rank["error"]
        assert (rank["restored"], rank["different"]) == (2, [])
    assert closed == [{"restored": 4, "different": []}] * 2
