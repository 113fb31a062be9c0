"""Training by several ranks has the bits of the same training in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import offload
from tests.ranks_training.launch import run

PROGRAM = "tests.ranks_training.program"


def train(directory: Path, num_ranks: int, **case: Any) -> list[dict[str, Any]]:
    said = run(num_ranks, PROGRAM, str(directory), json.dumps(case))
    assert [rank["different"] for rank in said] == [[]] * num_ranks
    return said


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "fsdp2-mixed"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_run_that_is_resumed_has_the_bits_of_one_in_memory(
    tmp_path: Path, kind: str, num_ranks: int
) -> None:
    said = train(tmp_path / "run", num_ranks, kind=kind, last=4, seals=[2, 4])
    assert [rank["sealed"] for rank in said] == [4] * num_ranks
    said = train(tmp_path / "run", num_ranks, kind=kind, first=5, last=7, seals=[7])
    assert [rank["resumed"] for rank in said] == [
        [4, {"step": 4, "rank": rank}] for rank in range(num_ranks)
    ]


def test_the_checkpoint_opens_as_it_lies(tmp_path: Path) -> None:
    """The model file is one safetensors file with the whole model; all bytes verify."""
    said = train(tmp_path / "run", 3, kind="fsdp2", last=3, seals=[3], values=True)
    (path,) = (tmp_path / "run").glob("step-*")
    found = load_file(path / "model.safetensors")
    whole = {
        name: [np.frombuffer(bytes.fromhex(rank["values"][name]), np.uint8) for rank in said]
        for name in said[0]["values"]
    }
    for name, parts in whole.items():
        data = found[name].contiguous().view(torch.uint8).numpy().reshape(-1)
        assert np.array_equal(data, np.concatenate(parts)), name
    assert set(found) == {*whole, "seen"}
    assert found["seen"] == 3
    with offload.open_checkpoint(tmp_path / "run") as checkpoint:
        assert checkpoint.train_states == [{"step": 3, "rank": rank} for rank in range(3)]
        assert checkpoint.train_state == {"step": 3, "rank": 0}
        assert checkpoint.verify().ok


def test_clipping_accumulation_scaling_and_other_optimizers(tmp_path: Path) -> None:
    for number, case in enumerate(
        [
            {"kind": "ddp", "clip": 0.1, "accumulate": 2},
            {"kind": "fsdp2-mixed", "clip": 0.1, "accumulate": 2},
            {"kind": "fsdp2", "infinite": 2},
            {"kind": "ddp", "optimizer": "SGD", "hyper": {"lr": 0.1, "momentum": 0.9}},
        ]
    ):
        train(tmp_path / str(number), 2, last=3, seals=[2], **case)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_steps_go_on_while_a_seal_writes(tmp_path: Path, kind: str) -> None:
    """The ranks write the next slots while the model file of an earlier one is written."""
    train(tmp_path / "run", 2, kind=kind, last=6, seals=[1, 2, 3, 4], slow_seals=True)
    with offload.open_checkpoint(tmp_path / "run") as checkpoint:
        assert checkpoint.step == 4
        assert checkpoint.verify().ok
    parts = [*(tmp_path / "run/owner-1").glob("part-*")]
    assert len(parts) <= 4, "two checkpoints, one that is written, and one that is sealed"


@pytest.mark.parametrize("collects", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_seal_that_fails_on_one_rank_fails_on_all_and_training_goes_on(
    tmp_path: Path, rank: int, *, collects: bool
) -> None:
    said = train(
        tmp_path / "run",
        2,
        kind="fsdp2",
        last=8,
        seals=[1, 3, 5],
        fails=[rank, 3],
        collects=collects,
    )
    for found in said:
        first, second, third = found["errors"]
        assert (first, third) == ("", "")
        assert second.startswith("sealing step 3 failed")
        assert "injected" in second
    with offload.open_checkpoint(tmp_path / "run") as checkpoint:
        assert checkpoint.step == 5
        assert checkpoint.verify().ok
