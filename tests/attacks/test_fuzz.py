"""A short run of the fuzzers; ``python -m tests.attacks.fuzz --seconds 600`` is a long one.

OFFLOAD_FUZZ_SEED repeats a run, OFFLOAD_FUZZ_EXAMPLES makes it longer.
"""

from __future__ import annotations

import os
import random

import pytest

from tests.attacks.fuzz import TARGETS, fuzz

NUM_EXAMPLES = int(os.environ.get("OFFLOAD_FUZZ_EXAMPLES", "250"))


@pytest.mark.parametrize("name", TARGETS)
def test_is_refused_by_name_or_means_the_same_when_written_again(name: str) -> None:
    seed = int(os.environ.get("OFFLOAD_FUZZ_SEED", random.randrange(2**32)))
    print(f"OFFLOAD_FUZZ_SEED={seed}")
    counts = fuzz(name, seed, NUM_EXAMPLES)
    print(f"{name}: {counts[True]} taken, {counts[False]} refused by name")
    assert counts[False] > NUM_EXAMPLES // 10
    if name != "train-state-file":  # there, any change of any byte is found
        assert counts[True] > 0
