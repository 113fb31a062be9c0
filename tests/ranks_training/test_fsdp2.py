"""FSDP2 as people use it: the bits of the same training in memory, resumed; refusals by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.ranks_training.cases import Case, compare, do, run_cases
from tests.ranks_training.rank_server import Jobs

TRAININGS = {
    "2 ranks": (2, ["Mixed", "Prefetched", "Accumulated", "Compiled", "Half"]),
    "beginnings": (2, ["Reset", "Meta", "Assigned", "SetByTorch", "ShardedLater", "Growing"]),
    "4 ranks": (4, ["Scaled"]),
}


@pytest.mark.parametrize(("num_ranks", "trainings"), TRAININGS.values(), ids=TRAININGS)
def test_a_stopped_and_resumed_run_has_the_bits_of_one_in_memory(
    jobs: Jobs, tmp_path: Path, num_ranks: int, trainings: Sequence[str]
) -> None:
    compare(jobs, tmp_path, [f"fsdp2_trainings:{one}" for one in trainings], num_ranks)


REFUSED = {
    "sharded": ("MismatchError", "Shard the model and give it memory before"),
    "assigned": ("MismatchError", "load without assign=True"),
    "on meta": ("UnsupportedParameterError", "is on meta"),
}


def test_what_takes_the_place_of_parameters_is_refused_with_the_remedy(
    jobs: Jobs, tmp_path: Path
) -> None:
    """Torch itself cannot offload shards to the CPU without a device."""
    refused = dict(REFUSED)
    if not torch.accelerator.is_available():
        # What torch says if it is built with CUDA, and there is no driver, is another sentence.
        said = "accelerator" if torch.version.cuda is None else "NVIDIA driver"
        refused["on the cpu"] = ("RuntimeError", said)
    cases: dict[str, Case] = {
        how: ([[do("fsdp2_trainings:replace_parameters", how)]] * 2, {}) for how in refused
    }
    for how, ranks in run_cases(jobs, tmp_path, cases, kind="").items():
        for rank in ranks:
            error, text = refused[how]
            assert rank.of("do")["error"] == error, rank.outcomes
            assert text in rank.of("do")["message"]
