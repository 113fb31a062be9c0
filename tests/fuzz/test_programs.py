"""Random training programs are the same here and in plain torch, to the bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.fuzz.breakages import BREAKAGES

from tests.campaigns import FULL
from tests.dying import dying
from tests.fuzz.program import Program, make

REPOSITORY = Path(__file__).parents[2]
FOUND = Path(__file__).parent / "found"
NUM_PROGRAMS = 50 if FULL else 12


def run_fuzz(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m tests.fuzz``, whose children are forked from a process without threads."""
    return subprocess.run(
        dying([sys.executable, "-m", "tests.fuzz", *arguments]),
        cwd=REPOSITORY,
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_random_programs_give_the_bits_of_plain_torch(tmp_path):
    record = tmp_path / "result.json"
    completed = run_fuzz("--count", str(NUM_PROGRAMS), "--shorten", "30", "--record", str(record))
    assert completed.returncode == 0, completed.stdout[-20_000:] + completed.stderr[-2000:]
    result = json.loads(record.read_text())
    assert (result["findings"], result["programs"]) == (0, NUM_PROGRAMS)
    assert sum(result["operations"].values()) >= NUM_PROGRAMS * 30


@pytest.mark.parametrize("path", sorted(FOUND.glob("*.json")), ids=lambda path: path.stem)
def test_programs_that_once_failed(path):
    completed = run_fuzz("--only", str(path), "--shorten", "0")
    assert completed.returncode == 0, completed.stdout[-20_000:]
    assert "1 programs" in completed.stdout


def test_faults_that_are_put_into_the_library_are_found():
    completed = run_fuzz("--faults", "--count", "60")  # one of them is a race
    assert completed.returncode == 0, completed.stdout + completed.stderr
    found = json.loads(completed.stdout.splitlines()[-1])
    assert found.keys() == BREAKAGES.keys()
    assert all(found.values())


def test_a_program_is_made_from_its_seed_and_number_alone():
    assert make(7, 3) == make(7, 3)
    assert make(7, 3) != make(7, 4)
    assert make(7, 3) != make(8, 3)
    assert Program.from_json(make(7, 3).to_json()).to_json() == make(7, 3).to_json()
