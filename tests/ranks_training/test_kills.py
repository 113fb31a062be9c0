"""A rank is killed at any moment: all ranks resume one step, and no acknowledged one is lost."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.eventually import eventually
from tests.ranks_training.launch import run, start, wait

PROGRAM = "tests.ranks_training.program"
LAST = 40


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_is_killed(tmp_path: Path, kind: str, victim: int) -> None:
    directory, acknowledged = tmp_path / "run", tmp_path / "acknowledged"
    case = {
        "kind": kind,
        "first": 0,
        "last": LAST,
        "seals": [*range(1, LAST + 1)],
        "acknowledge": str(acknowledged),
    }
    arguments = [str(directory), json.dumps(case)]
    ranks = start(2, PROGRAM, arguments)
    at = random.Random(f"{kind} {victim}").uniform(0, 0.3)
    has_sealed = eventually(acknowledged.exists)
    time.sleep(at)
    ranks[victim].kill()
    ended = wait(ranks)
    assert has_sealed, ended
    other = ended[1 - victim]
    assert other.status != 0, "the other rank went on as if nothing had happened"
    assert "killed after" not in other.errors, other.errors
    assert "Error: " in other.errors, other.errors
    durable = max(map(int, acknowledged.read_text().split()))
    case |= {"last": min(LAST, durable + 3), "acknowledge": ""}
    said = run(2, PROGRAM, str(directory), json.dumps(case))
    assert [rank["different"] for rank in said] == [[], []]
    steps = {rank["resumed"][0] for rank in said}
    assert len(steps) == 1
    assert steps.pop() >= durable
    assert [rank["resumed"][1]["rank"] for rank in said] == [0, 1]
    verify = subprocess.run(
        [sys.executable, "-m", "offload.cli", "verify", str(directory)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert verify.returncode == 0, verify.stdout + verify.stderr
