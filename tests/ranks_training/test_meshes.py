"""Meshes: replicated shards, tensor parallelism, and both, with the bits of training in memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

import offload
from tests.ranks_training.cases import compare, do, newest, require_success
from tests.ranks_training.rank_server import Jobs
from tests.stores.files import flip_on_disk


@pytest.mark.parametrize(
    ("num_ranks", "trainings"),
    [
        pytest.param(2, ["Tensor"], id="tensor parallelism"),
        pytest.param(4, ["Hsdp", "Uneven", "SequenceToo"], id="two dimensions"),
    ],
)
def test_a_stopped_and_resumed_run_has_the_bits_of_one_in_memory(
    jobs: Jobs, tmp_path: Path, num_ranks: int, trainings: Sequence[str]
) -> None:
    """Layers are cut by columns as well; each checkpoint has one whole `model.safetensors`."""
    compare(jobs, tmp_path, [f"mesh_trainings:{one}" for one in trainings], num_ranks)


def test_a_rank_that_cannot_write_its_columns_fails_the_seal_on_all(
    jobs: Jobs, tmp_path: Path
) -> None:
    """The next checkpoint is whole; damage in a column is found, and no rank continues from it."""
    calls = [do("scenes:columns_that_cannot_be_written")]
    require_success(jobs.run(tmp_path, [calls] * 2, kind=""))
    directory = tmp_path / "run"
    with offload.open_checkpoint(directory) as checkpoint:
        assert checkpoint.step == 2
        assert checkpoint.verify().ok
    path = newest(directory) / "model.safetensors"
    flip_on_disk(path, _last_byte(path, "blocks.0.down.weight"))
    with offload.open_checkpoint(directory) as checkpoint:
        (problem,) = checkpoint.verify().problems
        assert "model.safetensors" in problem
    restore = [do("scenes:restore_columns", str(directory))]
    for rank in jobs.run(tmp_path, [restore] * 2, kind=""):
        assert rank.failed() == ["DamagedError"], rank.outcomes


def _last_byte(path: Path, name: str) -> int:
    """Return the place of the last byte of a tensor in a file."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(size))
    return 8 + size + int(entries[name]["data_offsets"][1]) - 1
