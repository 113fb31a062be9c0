"""Exports and imports stream: a state larger than what the process may have goes through."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.exchange.streaming import KINDS

MIB = 1 << 20
SIZE = 10 << 20
"""Elements of bfloat16: 120 MiB of state."""

LIMIT_BYTES = 96 * MIB
"""Of private memory, beyond what the process had: two blocks of 16 MiB, three chunks of 3 MiB, and
the stacks and heaps of threads, which the kernel counts whole: 50 to 70 MiB in all."""


def test_a_state_larger_than_the_limit_on_memory_is_exported_and_imported(tmp_path):
    command = [sys.executable, "-m", "tests.exchange.streaming", str(tmp_path)]
    done = subprocess.run(
        [*command, str(SIZE), str(LIMIT_BYTES)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["refused"]
    assert found["state"] == 12 * SIZE > LIMIT_BYTES
    assert set(found["growth"]) == set(KINDS)
    for kind, growth in found["growth"].items():
        for bytes_ in growth.values():  # also of what is shared, which that limit does not count
            assert bytes_ < LIMIT_BYTES, kind
