"""DistributedDataParallel as people use it: the bits of the same training in memory, resumed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.ranks_training.cases import compare
from tests.ranks_training.rank_server import Jobs

TWO = ["Accumulated", "TorchScaler", "Groups", "Buffers", "Dropout"]


@pytest.mark.parametrize(
    ("num_ranks", "trainings"), [(2, TWO), (3, ["Unused", "Freezing", "Growing"])], ids=["2", "3"]
)
def test_a_stopped_and_resumed_run_has_the_bits_of_one_in_memory(
    jobs: Jobs, tmp_path: Path, num_ranks: int, trainings: Sequence[str]
) -> None:
    compare(jobs, tmp_path, [f"ddp_trainings:{one}" for one in trainings], num_ranks)
