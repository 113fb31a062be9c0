"""Random training programs are the same here and in plain torch, to the bit.

A short run tries a few, and those that once failed; FULL_TESTS=1 fifty.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.campaigns import FULL
from tests.fuzz.program import Program, make

FOUND = sorted((Path(__file__).parent / "found").glob("*.json"))
NUM_PROGRAMS = 50 if FULL else 2


def test_random_programs_give_the_bits_of_plain_torch(tmp_path):
    record = tmp_path / "result.json"
    also = [argument for path in FOUND for argument in ("--also", str(path))]
    completed = subprocess.run(
        [
            *(sys.executable, "-m", "tests.fuzz", *also, "--count", str(NUM_PROGRAMS)),
            *("--shorten", "30", "--record", str(record)),
        ],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stdout[-20_000:] + completed.stderr[-2000:]
    result = json.loads(record.read_text())
    assert (result["findings"], result["programs"]) == (0, len(FOUND) + NUM_PROGRAMS)
    assert sum(result["operations"].values()) >= NUM_PROGRAMS * 30


def test_a_program_is_made_from_its_seed_and_number_alone():
    assert make(7, 3) == make(7, 3)
    assert make(7, 3) != make(7, 4)
    assert make(7, 3) != make(8, 3)
    assert Program.from_json(make(7, 3).to_json()).to_json() == make(7, 3).to_json()
