"""The scripts in `docs/examples`, run small: killed in the middle, and run again."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
STEPS, KILLED_AT = 12, 9
TIMEOUT_S = 240


def losses(lines: list[str]) -> dict[int, str]:
    found = [re.fullmatch(r"step (\d+) loss (\S+)", line) for line in lines]
    return {int(match[1]): match[2] for match in found if match}


@pytest.mark.parametrize(
    ("example", "arguments"),
    [
        ("plain_loop.py", ["--steps=12", "--every=4", "--batch=2"]),
        ("lightning_loop.py", ["--epochs=3", "--steps=4"]),
    ],
    ids=["plain loop", "lightning"],
)
def test_an_example_that_is_killed_and_run_again_prints_the_same_losses(
    example: str, arguments: list[str], tmp_path: Path
) -> None:
    command = [
        sys.executable, "-m", "tests.integrations.example_runs",
        str(ROOT / "docs/examples" / example), str(tmp_path), str(KILLED_AT),
        *arguments,
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            output, errors = process.communicate(timeout=TIMEOUT_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, errors
    runs = {name: losses(lines) for name, lines in json.loads(output.splitlines()[-1]).items()}
    assert list(runs["whole"]) == list(range(1, STEPS + 1))
    assert max(runs["killed"]) >= KILLED_AT
    again = runs["again"]
    assert list(again) == list(range(min(again), STEPS + 1))
    assert 1 < min(again) <= KILLED_AT  # it went on, from a checkpoint
    for run in (runs["killed"], again):
        assert run == {step: runs["whole"][step] for step in run}
