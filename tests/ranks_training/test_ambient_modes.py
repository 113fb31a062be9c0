"""Modes of torch that some ranks have set change no bit: each rank has another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks_training.rank_server import Jobs

PROGRAM = "tests.ranks_training.ambient_calls"
MODES = [("inference", "", "float64"), ("meta", "autocast", "no grad")]


def calls_within(mode: str) -> list[Any]:
    """Return calls of a training, all of which a rank makes within a mode."""

    def call(name: str, *arguments: Any) -> list[Any]:
        return ["do", f"{PROGRAM}:within", mode, name, *arguments]

    step = ["do", f"{PROGRAM}:step", mode]
    seal = [call("checkpoint"), call("result")]
    calls = [call("open"), step, step, *seal, step, *seal, call("pin", "best"), call("restore")]
    return [*calls, step, *seal, ["verify"], ["bits"], call("close")]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_each_rank_makes_its_calls_within_another_mode(
    jobs: Jobs, tmp_path: Path, kind: str
) -> None:
    found = []
    for number, modes in enumerate([("", "", ""), *MODES]):
        folder = tmp_path / str(number)
        folder.mkdir()
        ranks = jobs.run(folder, [calls_within(mode) for mode in modes], kind=kind)
        for rank in ranks:
            assert rank.failed() == [], (modes, [one for one in rank.outcomes if one["error"]])
            assert rank.of("verify")["value"] == []
        found.append([rank.of("bits")["value"] for rank in ranks])
    assert found == [found[0]] * len(found)
