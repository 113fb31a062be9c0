"""Ranks that restore in the process that has trained and sealed go on with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks_training.rank_server import Jobs

SEAL: list[list[Any]] = [["step"], ["checkpoint"], ["result"]]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_restore_and_more_steps_in_one_process(jobs: Jobs, tmp_path: Path, kind: str) -> None:
    """The writer goes on with the layout that it has, and every other rank with one it has read."""
    (tmp_path / "plain").mkdir()
    plain = jobs.run(
        tmp_path / "plain", [[["open"], *[["step"]] * 5]] * 2, kind=kind, is_plain=True
    )
    back: list[list[Any]] = [["step"], ["restore"], ["bits"]]
    calls: list[list[Any]] = [["open"], *SEAL, *back, *SEAL, *SEAL, ["step"], *back, ["step"]]
    for rank, found in zip(plain, jobs.run(tmp_path, [calls] * 2, kind=kind), strict=True):
        assert (found.status, found.failed()) == (0, []), found.errors
        expected = [one["value"] for one in rank.outcomes if one["call"] == "step"]
        bits = [one["value"] for one in found.outcomes if one["call"] in ("step", "bits")]
        steps = [1, 2, 1, 2, 3, 4, 5, 3, 4]
        assert bits == [expected[step - 1] for step in steps]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_each_rank_lists_the_checkpoints_that_exist(kind: str, jobs: Jobs, tmp_path: Path) -> None:
    """A checkpoint whose slot is given out again is in the list of no rank."""
    listed = ["do", "tests.ranks_training.loading:listed_while_pins_move", 5]
    calls: list[list[Any]] = [["open", {"keep": 1}], listed, ["close"]]
    for rank in jobs.run(tmp_path, [calls] * 2, kind=kind):
        assert rank.failed() == [], rank.outcomes
        assert rank.of("do")["value"] == [[], [1], [1, 2], [2, 3], [3, 4]]


@pytest.mark.parametrize("end", [[], [["destroy"]], [["leave"]]], ids=["end", "destroy", "raise"])
def test_scripts_whose_last_call_is_checkpoint_have_sealed(
    jobs: Jobs, tmp_path: Path, end: list[list[Any]]
) -> None:
    """Nothing waits for the seal, and one rank has ended its script before the others do."""
    last: list[list[Any]] = [["open"], ["step"], ["checkpoint"]]
    ranks = jobs.run(tmp_path, [[*last, ["sleep", 0.5]], [*last, *end]], kind="fsdp2")
    assert [bool(rank.status) for rank in ranks] == [False, end == [["leave"]]]
    assert [rank.failed() for rank in ranks] == [[], []]
    again: list[list[Any]] = [["open"], ["restore"], ["bits"], ["verify"]]
    for before, rank in zip(ranks, jobs.run(tmp_path, [again] * 2, kind="fsdp2"), strict=True):
        assert rank.of("restore")["value"][0] == 1
        assert rank.of("bits")["value"] == before.of("step")["value"]
        assert rank.of("verify")["value"] == []
