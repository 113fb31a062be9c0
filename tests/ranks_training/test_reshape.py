"""What some ranks have stored is used by any other number of ranks, in any sharding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import offload
from tests.ranks_training.rank_server import Jobs

STEPS = 2
"""Steps that each job of a chain takes."""


def go_on(jobs: Jobs, folder: Path, num: int, kind: str, first: int, **setting: Any) -> Any:
    """Let ranks continue from the newest checkpoint, step, and seal; return what they have."""
    calls = [
        ["open"],
        ["restore"],
        ["whole"],
        ["step", STEPS],
        ["checkpoint"],
        ["result"],
        ["whole"],
        ["close"],
    ]
    setting = {"given": True, "kind": kind, **setting}
    ranks = jobs.run(folder, [calls] * num, **setting)
    for rank in ranks:
        assert not rank.failed(), [one for one in rank.outcomes if one["error"]]
        assert rank.status == 0, rank.errors
    restored = ranks[0].of("restore")["value"]
    assert restored == (first and [first, {"step": first, "rank": 0}] or None)
    assert all(rank.of("result")["value"] == first + STEPS for rank in ranks)
    return ranks[0].of("whole")["value"]


def expected(jobs: Jobs, folder: Path, last: int, **setting: Any) -> list[Any]:
    """Return what parameters are after each step of torch's own optimizer, in one process."""
    calls = [["open"], *[["step"], ["whole"]] * last]
    setting = {"given": True, "kind": "one", "is_plain": True, **setting}
    (rank,) = jobs.run(folder, [calls], **setting)
    assert not rank.failed(), rank.outcomes
    return [one["value"] for one in rank.outcomes if one["call"] == "whole"]


CHAIN = [(4, "ddp"), (2, "ddp"), (1, "one"), (3, "ddp"), (4, "fsdp2"), (1, "one"), (2, "fsdp2")]


@pytest.mark.parametrize("options", [{}, {"master": "split"}], ids=["exact", "split"])
def test_a_chain(jobs: Jobs, tmp_path: Path, options: dict[str, Any]) -> None:
    plain = expected(jobs, tmp_path, STEPS * len(CHAIN))
    for number, (num, kind) in enumerate(CHAIN):
        found = go_on(jobs, tmp_path, num, kind, STEPS * number, options=options)
        assert found == plain[STEPS * (number + 1) - 1], (number, num, kind)
        with offload.open_checkpoint(tmp_path / "run") as checkpoint:
            assert checkpoint.verify().ok
