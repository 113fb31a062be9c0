"""Training by several ranks has the bits of the same training in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.ranks_training.launch import run

PROGRAM = "tests.ranks_training.program"


def train(directory: Path, num_ranks: int, **case: Any) -> list[dict[str, Any]]:
    said = run(num_ranks, PROGRAM, str(directory), json.dumps(case))
    assert [rank["different"] for rank in said] == [[]] * num_ranks
    return said


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "fsdp2-mixed"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_run_that_is_resumed_has_the_bits_of_one_in_memory(
    tmp_path: Path, kind: str, num_ranks: int
) -> None:
    said = train(tmp_path / "run", num_ranks, kind=kind, last=4, seals=[2, 4])
    assert [rank["sealed"] for rank in said] == [4] * num_ranks
    said = train(tmp_path / "run", num_ranks, kind=kind, first=5, last=7, seals=[7])
    assert [rank["resumed"] for rank in said] == [
        [4, {"step": 4, "rank": rank}] for rank in range(num_ranks)
    ]
