"""A short run of the fuzzers; ``python -m tests.attacks.fuzz --seconds 600`` is a long one.

OFFLOAD_FUZZ_SEED makes it another one, OFFLOAD_FUZZ_EXAMPLES a longer one.
"""

from __future__ import annotations

import os

import pytest

from tests.attacks.fuzz import TARGETS, fuzz
from tests.campaigns import FULL

SEED = int(os.environ.get("OFFLOAD_FUZZ_SEED", "20261121"))
NUM_EXAMPLES = int(os.environ.get("OFFLOAD_FUZZ_EXAMPLES", "250" if FULL else "40"))


@pytest.mark.parametrize("name", TARGETS)
def test_is_refused_by_name_or_means_the_same_when_written_again(name: str) -> None:
    counts = fuzz(name, SEED, NUM_EXAMPLES)
    assert counts[False] > NUM_EXAMPLES // 10
    if name != "train-state-file":  # there, any change of any byte is found
        assert counts[True] > 0
