"""Meshes: replicated shards, tensor parallelism, and both, with the bits of training in memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.ranks_training.cases import compare
from tests.ranks_training.rank_server import Jobs


@pytest.mark.parametrize(
    ("num_ranks", "trainings"),
    [
        pytest.param(2, ["Tensor"], id="tensor parallelism"),
        pytest.param(4, ["Hsdp", "Both"], id="two dimensions"),
    ],
)
def test_a_stopped_and_resumed_run_has_the_bits_of_one_in_memory(
    jobs: Jobs, tmp_path: Path, num_ranks: int, trainings: Sequence[str]
) -> None:
    """With tensor parallelism, layers are cut by columns as well, and are in shard files."""
    compare(jobs, tmp_path, [f"mesh_trainings:{one}" for one in trainings], num_ranks)
