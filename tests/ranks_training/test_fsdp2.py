"""FSDP2 as people use it: the bits of the same training in memory, resumed; refusals by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.ranks_training.rank_server import Jobs


@pytest.mark.parametrize(
    ("num_ranks", "trainings"),
    [
        pytest.param(2, ["Mixed", "Resharded", "Prefetched", "Accumulated"], id="sharding"),
        pytest.param(2, ["Meta", "Reset", "Assigned", "SetByTorch"], id="beginnings"),
        pytest.param(2, ["Recomputed", "Compiled", "Ignored"], id="wrappers"),
        pytest.param(2, ["Groups", "Sgd", "Split", "Int8State"], id="optimizers"),
        pytest.param(2, ["Freezing", "Growing", "ShardedLater"], id="changes"),
        pytest.param(4, ["Uneven", "Scaled"], id="4 ranks"),
        pytest.param(2, ["Half"], id="fp16"),
    ],
)
def test_a_stopped_and_resumed_run_has_the_bits_of_one_in_memory(
    jobs: Jobs, tmp_path: Path, num_ranks: int, trainings: Sequence[str]
) -> None:
    jobs.compare(tmp_path, "fsdp2_trainings", trainings, num_ranks)


REFUSED = {
    "sharded_after_construction": ("MismatchError", "Shard the model and give it memory before"),
    "assigned_after_construction": ("MismatchError", "load without assign=True"),
    "on_meta": ("UnsupportedParameterError", "is on meta"),
}


def test_what_takes_the_place_of_parameters_is_refused_with_the_remedy(
    jobs: Jobs, tmp_path: Path
) -> None:
    calls = [["scene", name] for name in REFUSED]
    for rank in jobs.run(tmp_path, [calls, calls], kind=""):
        for (error, text), outcome in zip(REFUSED.values(), rank.outcomes, strict=True):
            assert outcome["error"] == error
            assert text in outcome["message"]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="torch has a device to compute on")
def test_torch_itself_cannot_offload_shards_without_a_device(jobs: Jobs, tmp_path: Path) -> None:
    calls = [["scene", "offloaded_to_the_cpu"]]
    for rank in jobs.run(tmp_path, [calls, calls], kind=""):
        assert "accelerator" in rank.of("scene")["message"]
