"""Buffers that differ between ranks: checkpoints have those of rank 0, which is said once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks_training.rank_server import Jobs, Rank

Calls = list[list[Any]]
MODULE = "tests.ranks_training.buffers"
STEP: list[Any] = ["do", f"{MODULE}:step_warning"]
SEAL: Calls = [["checkpoint"], ["result"]]


def run(jobs: Jobs, folder: Path, kind: str, calls: Calls, num: int = 2) -> list[Rank]:
    ranks = jobs.run(folder, [calls] * num, kind=kind, given=True)
    assert [rank.status for rank in ranks] == [0] * num, [rank.errors for rank in ranks]
    return ranks


def warned(rank: Rank) -> list[list[list[str]]]:
    """Return what each step has warned of."""
    return [one["value"] for one in rank.outcomes if one["call"] == "do" and one["value"]]


@pytest.mark.parametrize(
    ("kind", "how"), [("fsdp2", {}), ("ddp", {"broadcast": False})], ids=["fsdp2", "ddp"]
)
def test_a_buffer_that_differs_is_named_once_by_the_writer(
    jobs: Jobs, tmp_path: Path, kind: str, how: dict[str, Any]
) -> None:
    make = ["do", f"{MODULE}:make", True]
    first, *others = run(
        jobs, tmp_path, kind, [[*make, *how.values()], ["open"], STEP, *SEAL, STEP, *SEAL], 3
    )
    ((text, filename),), *more = warned(first)
    assert text.startswith("the buffer 'own' has other values on rank 1 than on rank 0.")
    assert filename.endswith("tests/ranks_training/buffers.py"), "it shows the user's own line"
    assert more == []
    assert [warned(rank) for rank in others] == [[], []]
    assert [rank.of("result")["value"] for rank in (first, *others)] == [2, 2, 2]
    look: Calls = [make, ["open"], ["restore"], ["do", f"{MODULE}:value"]]
    for rank in run(jobs, tmp_path, kind, look, 3):
        assert rank.of("do")["value"] == 0.0, "restore() gives all ranks that of rank 0"


def test_a_buffer_that_differs_later_is_found_by_the_next_grant(jobs: Jobs, tmp_path: Path) -> None:
    make, change = ["do", f"{MODULE}:make", False], ["do", f"{MODULE}:change"]
    calls: Calls = [make, ["open"], STEP, change, STEP, *SEAL, STEP]
    first, other = run(jobs, tmp_path, "fsdp2", calls)
    assert [one["value"] for one in first.outcomes if one["call"] == "do"][:4] == [
        None,
        [],
        None,
        [],
    ]
    assert len(warned(first)) == 1
    assert warned(other) == []


@pytest.mark.parametrize(
    ("kind", "make"),
    [("fsdp2", [False]), ("ddp", [True]), ("fsdp2", [True, True, False])],
    ids=["equal", "broadcast-by-ddp", "not-persistent"],
)
def test_nothing_is_said_of_what_is_the_same_or_not_stored(
    jobs: Jobs, tmp_path: Path, kind: str, make: list[bool]
) -> None:
    calls: Calls = [["do", f"{MODULE}:make", *make], ["open"], STEP, *SEAL, STEP]
    for rank in run(jobs, tmp_path, kind, calls):
        assert warned(rank) == []


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
def test_a_warning_that_is_an_error_refuses_the_step_on_all_ranks(
    jobs: Jobs, tmp_path: Path, kind: str
) -> None:
    calls: Calls = [
        ["do", f"{MODULE}:make", True, False], ["open"], ["backward"], ["strict", "attempt"],
        ["update"], ["bits"], *SEAL, ["verify"],
    ]  # fmt: skip
    ranks = run(jobs, tmp_path, kind, calls)
    for rank, error in zip(ranks, ["RuntimeWarning", "RanksError"], strict=True):
        (failed,) = [one for one in rank.outcomes if one["error"]]
        assert (failed["call"], failed["error"]) == ("strict", error)
        assert "the buffer 'own' has other values on rank 1" in failed["message"]
        assert rank.of("result")["value"] == 1
        assert rank.of("verify")["value"] == []
    (tmp_path / "plain").mkdir()
    whole: Calls = [["do", f"{MODULE}:make", True, False], ["open"], ["step"]]
    plain = jobs.run(tmp_path / "plain", [whole] * 2, kind=kind, given=True, is_plain=True)
    assert [r.of("bits")["value"] for r in ranks] == [r.of("step")["value"] for r in plain]


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
def test_an_extra_state_comes_back_on_all_ranks(jobs: Jobs, tmp_path: Path, kind: str) -> None:
    """It is that of rank 0, as buffers are, and the hooks of a load run on each rank."""
    calls: Calls = [["do", f"{MODULE}:count", 5], ["open"], STEP, *SEAL]
    for rank in run(jobs, tmp_path, kind, calls):
        assert rank.of("result")["value"] == 1
    look: Calls = [["do", f"{MODULE}:count", 0], ["open"], ["restore"]]
    for num in (2, 3):
        for rank in run(jobs, tmp_path, kind, [*look, ["do", f"{MODULE}:counted"]], num):
            assert rank.of("do")["value"] == [5, 1]
