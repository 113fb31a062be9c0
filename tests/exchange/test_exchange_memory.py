"""Exports and imports stream: their memory does not depend on the size of the state."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

MIB = 1 << 20
SIZE = 24 << 20
"""Elements of bfloat16: 288 MiB of state."""

LIMIT_BYTES = 140 * MIB
"""Of growth: three chunks of 12 MiB, blocks of 16 MiB, and what torch loads when first used."""

CHILD = """
import json, sys
from tests.exchange.streaming import run
print(json.dumps(run(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
"""


def child(command: str, directory: str) -> dict[str, int]:
    arguments = [sys.executable, "-c", CHILD, command, directory, str(SIZE)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    directory = tmp_path_factory.mktemp("exchange")
    child("make", str(directory))
    yield directory
    shutil.rmtree(directory)


pytestmark = pytest.mark.slow  # it writes some GiB


@pytest.mark.parametrize("kind", ["pt", "hf", "safetensors", "dcp"])
def test_peak_memory(store, kind) -> None:
    found = child(kind, str(store))
    assert found["state"] == 12 * SIZE
    assert found["state"] > 2 * LIMIT_BYTES
    assert found["peak_above"] < LIMIT_BYTES
    if kind != "safetensors":
        assert found["import_peak_above"] < LIMIT_BYTES
