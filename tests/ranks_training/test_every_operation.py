"""Any operation of one rank fails once while ranks open a store, or restore: all raise, or none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.limits import UNREACHED_AGREEMENT_S
from tests.ranks_training.rank_server import Jobs

BEGIN: list[list[Any]] = [["open"], ["step"], ["checkpoint"], ["result"], ["close"]]
PROGRAM = "tests.ranks_training.every_operation"


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("victim", [0, 2])
def test_opening(jobs: Jobs, tmp_path: Path, victim: int, *, looks: bool) -> None:
    jobs.run(tmp_path, [BEGIN] * 3)
    opening = ["do", f"{PROGRAM}:opening", victim, {"looks": looks}]
    calls = [opening, ["open"], ["restore"], ["step"]]
    for rank in jobs.run(tmp_path, [calls] * 3, timeout_s=UNREACHED_AGREEMENT_S):
        assert rank.failed() == [], rank.outcomes
        wrong, num = rank.of("do")["value"]
        assert wrong == []
        assert num > 4
        assert rank.of("restore")["value"][0] == 1


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.parametrize("victim", [0, 2])
def test_restoring(jobs: Jobs, tmp_path: Path, kind: str, victim: int) -> None:
    """What fails once in reading is no damage: the checkpoint is restored by the next call."""
    jobs.run(tmp_path, [BEGIN] * 3, kind=kind)
    calls = [["open"], ["do", f"{PROGRAM}:restoring", victim, 1], ["restore"], ["step"]]
    for rank in jobs.run(tmp_path, [calls] * 3, kind=kind, timeout_s=UNREACHED_AGREEMENT_S):
        assert rank.failed() == [], rank.outcomes
        wrong, num = rank.of("do")["value"]
        assert wrong == []
        assert num > 4
        assert rank.of("restore")["value"][0] == 1
