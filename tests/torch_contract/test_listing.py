"""Checkpoints are listed in the order in which they were made, the newest last."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import offload
from offload.cli.app import app


def sealed_at(directory: Path, steps: list[int], keep: int = 9) -> list[str]:
    """Make checkpoints of these steps, in this order; returns their paths."""
    parameter = torch.nn.Parameter(torch.ones(30))
    options = offload.Options(allow_volatile=True, train_state_bytes=8192)
    paths = []
    with offload.AdamW([parameter], directory=directory, keep=keep, options=options) as optimizer:
        for step in steps:
            parameter.grad = torch.ones(30)
            optimizer.step()
            full = optimizer.full_state_dict()
            optimizer.load_state_dict({**full, "num_steps": step})
            paths.append(optimizer.checkpoint({"at": step}).result().path)
    return paths


@pytest.mark.parametrize("steps", [[1, 2, 3], [6, 3], [10, 2, 30, 20, 4]], ids=str)
def test_the_newest_is_last_whatever_its_step_is(steps, tmp_path):
    paths = sealed_at(tmp_path / "run", steps)
    listed = offload.list_checkpoints(tmp_path / "run")
    assert [info.step for info in listed] == steps
    assert [info.path for info in listed] == paths
    assert [info.generation for info in listed] == sorted(info.generation for info in listed)
    with offload.open_checkpoint(tmp_path / "run") as newest:
        assert newest.path == listed[-1].path
    found = CliRunner().invoke(app, ["ls", str(tmp_path / "run"), "--json"])
    assert [info["step"] for info in json.loads(found.stdout)] == steps
    table = CliRunner().invoke(app, ["ls", str(tmp_path / "run")]).stdout
    places = [table.index(f"step-{step:08}") for step in steps]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("steps", "damaged", "expected"),
    [
        ([1, 2, 3], {3}, [1, 2, 3]),
        ([1, 2, 3], {1, 2}, [1, 2, 3]),
        ([10, 2, 30, 20, 4], {2, 4}, [2, 4, 10, 30, 20]),
        ([10, 2, 30, 20, 4], {30, 10}, [2, 10, 20, 4, 30]),
        ([5], {5}, [5]),
    ],
    ids=str,
)
def test_one_that_cannot_be_read_is_where_its_step_says(steps, damaged, expected, tmp_path):
    sealed_at(tmp_path / "run", steps)
    for step in damaged:
        (tmp_path / "run" / f"step-{step:08}" / "manifest.json").write_text("{}")
    listed = offload.list_checkpoints(tmp_path / "run")
    assert [info.step for info in listed] == expected
    assert {info.step for info in listed if not info.valid} == damaged
