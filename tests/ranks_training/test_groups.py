"""Groups of ranks beside each other, each with a model and a directory of its own."""

from __future__ import annotations

from pathlib import Path

from tests.ranks_training.groups import PAIRS
from tests.ranks_training.launch import run


def test_two_groups_of_two_ranks_do_not_disturb_each_other(tmp_path: Path) -> None:
    said = run(4, "tests.ranks_training.groups", str(tmp_path))
    for number, pair in enumerate(PAIRS):
        for rank in pair:
            assert said[rank] == {
                "states": [{"rank": other} for other in pair],
                "values": [number - 1.0],
            }
