"""Readers of checkpoints that several ranks made, against one process that trains the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from offload import Checkpoint, CheckpointError, DamagedError, open_checkpoint, read_state
from tests.numerics.reference import assert_same_bits
from tests.ranks_training.given import train_alone
from tests.ranks_training.rank_server import Jobs
from tests.stores.files import flip_on_disk

TRAIN = "tests.ranks_training.given:train"

CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "ddp-2-bf16": (2, {"kind": "ddp"}, {}),
    "ddp-3-fp32-unstepped": (3, {"kind": "ddp", "dtype": "float32"}, {"skip": "maybe"}),
    "fsdp2-2-split": (2, {"kind": "fsdp2", "options": {"master": "split"}}, {}),
    "fsdp2-3-bf16-state": (3, {"kind": "fsdp2", "options": {"state_dtype": "bfloat16"}}, {}),
    "fsdp2-3-momentum": (3, {"kind": "fsdp2"}, {"optimizer": "SGD", "momentum": 0.9}),
    "fsdp2-2-fp32-amsgrad": (2, {"kind": "fsdp2", "dtype": "float32"}, {"amsgrad": True}),
}
"""Ranks, settings and arguments of each training."""

WIDTHS = (40, 70, 33)
"""Sizes for which a parameter has several chunks, and shards of FSDP2 are uneven."""


def trained(
    jobs: Jobs, folder: Path, num_ranks: int, setting: dict[str, Any], how: dict[str, Any]
) -> Path:
    """Let ranks train and seal; return the store."""
    folder.mkdir(exist_ok=True)
    call = ["do", TRAIN, how]
    for rank in jobs.run(folder, [[call]] * num_ranks, widths=WIDTHS, **setting):
        assert rank.failed() == [], rank.of("do")["message"]
    return folder / "run"


def read_all(checkpoint: Checkpoint) -> None:
    for tensor in checkpoint.manifest.layout.model:
        if tensor.name not in ("frozen", "seen"):
            read_state(checkpoint, tensor.name)


@pytest.mark.parametrize(("num_ranks", "setting", "how"), CASES.values(), ids=CASES)
def test_state_of_each_parameter_is_that_of_one_process(
    jobs: Jobs, tmp_path: Path, num_ranks: int, setting: dict[str, Any], how: dict[str, Any]
) -> None:
    store = trained(jobs, tmp_path / "ranks", num_ranks, setting, how)
    alone = train_alone(tmp_path / "alone", {**setting, "widths": WIDTHS}, **how)
    with open_checkpoint(store) as ours, open_checkpoint(alone) as expected:
        assert len(ours.owners) == num_ranks - 1
        names = [spec.name for spec in expected.manifest.layout.parameters]
        assert len(names) == 5
        for name in names:
            found, whole = read_state(ours, name), read_state(expected, name)
            assert found.keys() == whole.keys()
            for array, value in whole.items():
                assert_same_bits(found[array], value, f"{array} of {name}")


def test_what_is_missing_or_damaged_is_named(jobs: Jobs, tmp_path: Path) -> None:
    store = trained(jobs, tmp_path / "ranks", 2, {"kind": "fsdp2"}, {})
    name = "layers.0.weight"
    with open_checkpoint(store) as opened:
        expected = read_state(opened, name)
        (part,) = [Path(owner.path) for owner in opened.owners]
    path = part / "exp_avg.safetensors"
    flip_on_disk(path, path.stat().st_size - 5)
    with open_checkpoint(store) as opened:
        with pytest.raises(DamagedError, match=str(path)):
            read_all(opened)
        flip_on_disk(path, path.stat().st_size - 5)
        assert torch.equal(read_state(opened, name)["exp_avg"], expected["exp_avg"])
    part.parent.rename(tmp_path / "owner-1")
    with open_checkpoint(store) as opened, pytest.raises(CheckpointError, match="owner 1"):
        read_state(opened, name)
    with open_checkpoint(store, parts=[tmp_path]) as opened:
        assert torch.equal(read_state(opened, name)["exp_avg"], expected["exp_avg"])
    (tmp_path / "owner-1").rename(part.parent)
    part.rename(part.with_name("part-77"))
    with pytest.raises(CheckpointError, match=r"the part of owner 1 in its state is missing"):
        open_checkpoint(store).close()
