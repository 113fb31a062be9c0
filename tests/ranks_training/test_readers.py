"""Readers of checkpoints that several ranks made, against one process that trains the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from offload import (
    Checkpoint,
    CheckpointError,
    DamagedError,
    export_checkpoint,
    open_checkpoint,
    read_state,
)
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
    "fsdp-tp-4": (4, {"kind": ""}, {"layout": "fsdp-tp"}),
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


EXPORTED = ("ddp-2-bf16", "fsdp2-3-momentum", "fsdp-tp-4")


@pytest.mark.parametrize("case", EXPORTED)
def test_exports_are_byte_for_byte_those_of_one_process(
    jobs: Jobs, tmp_path: Path, case: str
) -> None:
    num_ranks, setting, how = CASES[case]
    store = trained(jobs, tmp_path / "ranks", num_ranks, setting, how)
    alone = train_alone(tmp_path / "alone", {**setting, "widths": WIDTHS}, **how)
    for kind in ("pt", "hf", "safetensors", "dcp"):
        contents = []
        for path in (store, alone):
            told: list[tuple[int, int]] = []
            with open_checkpoint(path) as opened:
                export_checkpoint(
                    opened, path / kind, kind, progress=lambda *now, told=told: told.append(now)
                )
            assert told == sorted(told)
            assert told[-1][0] == told[-1][1]
            contents.append(content(path / kind))
        ours, expected = contents
        if kind == "dcp":  # torch puts a random number into the file
            found, wanted = (
                FileSystemReader(path / kind).read_metadata() for path in (store, alone)
            )
            assert found.state_dict_metadata == wanted.state_dict_metadata
            assert found.storage_data == wanted.storage_data
            del ours[".metadata"], expected[".metadata"]
        assert ours.keys() == expected.keys()
        assert [name for name in ours if ours[name] != expected[name]] == [], kind


def content(path: Path) -> dict[str, bytes]:
    """Return the content of a file, or of each file in a directory."""
    files = [path] if path.is_file() else sorted(path.iterdir())
    return {file.name: file.read_bytes() for file in files}


def test_an_export_without_an_owner_is_refused(jobs: Jobs, tmp_path: Path) -> None:
    store = trained(jobs, tmp_path / "ranks", 2, {"kind": "fsdp2"}, {})
    (store / "owner-1").rename(tmp_path / "owner-1")
    with open_checkpoint(store) as opened, pytest.raises(CheckpointError, match="owner 1"):
        export_checkpoint(opened, tmp_path / "out", "safetensors")
    assert not (tmp_path / "out").exists()


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
