"""DistributedDataParallel as people use it: the bits of the same training in memory, resumed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.ranks_training.rank_server import Jobs


@pytest.mark.parametrize(
    ("num_ranks", "trainings"),
    [
        pytest.param(2, ["StaticGraph", "BucketViews", "Tied"], id="wrappers"),
        pytest.param(2, ["NoSync", "TorchScaler", "OurScaler"], id="gradients"),
        pytest.param(3, ["Unused", "Freezing", "Growing"], id="unused, frozen and added"),
        pytest.param(2, ["Groups", "Sgd", "Buffers", "Dropout"], id="groups, buffers, dropout"),
        pytest.param(2, ["Split", "Bf16State", "Int8State", "Int8SplitState"], id="forms of state"),
        pytest.param(4, ["NoSync"], id="4 ranks"),
    ],
)
def test_a_stopped_and_resumed_run_has_the_bits_of_one_in_memory(
    jobs: Jobs, tmp_path: Path, num_ranks: int, trainings: Sequence[str]
) -> None:
    jobs.compare(tmp_path, "ddp_trainings", trainings, num_ranks)
