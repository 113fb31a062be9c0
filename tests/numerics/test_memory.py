"""The memory that steps, checkpoints and restores take does not depend on the model."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.dying import dying
from tests.numerics.measure import MIB

SIZES = (32 << 20, 80 << 20)
"""Elements. One byte more for each would make a difference of 48 MiB. The smaller model fills the
four blocks of 16 MiB through which a restore moves parameters. The state of the larger one is less
than 1 GiB, from which on the first step measures the drive, and takes memory for that."""

SEAL_BYTES = 4 * 16 * MIB
"""The three blocks through which parameters are written, and the fourth one of a restore."""

CONSTANT_BYTES = 24 * MIB
"""Buffers that come and go, more of them where more threads update, and what malloc keeps of them:
3 to 18 MiB were seen."""


def measure(directory: Path, num_parameters: int) -> dict[str, Any]:
    result = subprocess.run(
        dying(
            [sys.executable, "-m", "tests.numerics.measure", *map(str, (directory, num_parameters))]
        ),
        capture_output=True,
        text=True,
        timeout=240,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    if "skip" in found:
        pytest.skip(found["skip"])
    return found


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    found = []
    for size in SIZES:
        directory = tmp_path_factory.mktemp("memory")
        try:
            found.append(measure(directory, size))
        finally:
            shutil.rmtree(directory)  # gigabytes
    return found


def test_the_peak_above_parameters_and_gradients_is_the_ring_and_a_constant(measured):
    for found in measured:
        assert found["before"] > found["parameters_and_gradients"]
        assert found["peak_above"] <= found["ring"] + SEAL_BYTES + CONSTANT_BYTES
        assert found["peak_above"] < found["state"] / 3


def test_the_peak_is_the_same_for_a_model_two_and_a_half_times_as_large(measured):
    small, large = measured
    for name in ("parameters_and_gradients", "state"):
        assert large[name] * SIZES[0] == small[name] * SIZES[1]
    assert large["ring"] == small["ring"]
    assert abs(large["peak_above"] - small["peak_above"]) <= CONSTANT_BYTES
