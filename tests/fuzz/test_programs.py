"""Fifty random training programs are the same here and in plain torch, to the bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz.breakages import BREAKAGES
from tests.fuzz.program import Program, make

REPOSITORY = Path(__file__).parents[2]


def run_programs(
    folder: Path, *arguments: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Run ``python -m tests.fuzz``, whose children are forked from a process without threads."""
    record = folder / "result.json"
    completed = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "--record", str(record), *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
        capture_output=True,
        text=True,
        check=False,
    )
    return completed, json.loads(record.read_text())


@pytest.mark.parametrize("first", [0, 25])
def test_random_programs_give_the_bits_of_plain_torch(first, tmp_path):
    completed, result = run_programs(tmp_path, "--first", str(first), "--count", "25")
    assert completed.returncode == 0, completed.stdout[-20_000:] + completed.stderr[-2000:]
    assert result["findings"] == 0
    assert result["programs"] == 25
    assert sum(result["operations"].values()) >= 25 * 30


@pytest.mark.parametrize("fault", sorted(BREAKAGES))
def test_a_fault_that_is_put_into_the_library_is_found(fault, tmp_path):
    completed, result = run_programs(
        tmp_path, "--break", fault, "--stop", "--shorten", "0", "--count", "20"
    )
    assert completed.returncode == 1, completed.stdout + completed.stderr
    assert result["findings"] == 1
    assert "differ" in completed.stdout or "plain" in completed.stdout


def test_a_program_is_made_from_its_seed_and_number_alone():
    assert make(7, 3) == make(7, 3)
    assert make(7, 3) != make(7, 4)
    assert make(7, 3) != make(8, 3)
    assert Program.from_json(make(7, 3).to_json()).to_json() == make(7, 3).to_json()
