"""Killed with SIGKILL hundreds of times, a run ends with the bits of one that nobody disturbed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from gds import PosixBackend
from offload import open_checkpoint
from tests.crash.training import Reference, differences

ROOT = Path(__file__).parents[2]
SEED = int(os.environ.get("KILL_SEED", "20260711"))
NUM_KILLS = int(os.environ.get("NUM_KILLS", "120"))


@pytest.mark.parametrize("keep", [1, 2], ids="keep={}".format)
def test_killed_at_random_moments(
    keep: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    command = [sys.executable, "-m", "tests.crash.killing", tmp_path, keep, NUM_KILLS, SEED]
    ended = subprocess.run(
        [str(part) for part in command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    result = json.loads(ended.stdout)
    print(f"KILL_SEED={SEED}, keep={keep}: {result}")
    record_property("kills", result["killed"])

    assert result["killed"] == NUM_KILLS == sum(result["phases"].values())
    assert result["phases"].get("stepping"), "kills must hit steps"
    assert result["sealing"], "kills must hit seals in progress"
    restored = result["restored"]
    assert all(earlier <= later for earlier, later in pairwise(restored))
    assert len(set(restored)) > NUM_KILLS // 10, "the run must have got on between the kills"
    assert len(result["left"]) <= 1 + keep + 1, "LOCK, and keep + 1 slots"

    last_step = result["last_step"]
    assert result["acknowledged"] == last_step
    name = f"step-{last_step:08d}"
    checkpoint = tmp_path / "killed" / name
    with open_checkpoint(checkpoint) as found:
        assert found.train_state == {"step": last_step}
        assert differences(found, PosixBackend(), Reference().after(last_step)) == []
        files = found.files
    for file in files:
        if file != "manifest.json" and file != "train_state.safetensors":
            same = (tmp_path / "undisturbed" / name / file).read_bytes()
            assert (checkpoint / file).read_bytes() == same, f"{file} differs"
