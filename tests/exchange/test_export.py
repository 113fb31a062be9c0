"""Exports, read with the other side's own loader, against an optimizer that was in memory."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import offload
from offload import export_checkpoint, import_checkpoint
from offload.errors import DamagedError, StoreError
from tests.exchange.test_torch_dicts import numbered
from tests.numerics.models import Mixed
from tests.numerics.pairs import CASES, Case, Cut, Pair
from tests.numerics.reference import assert_same_bits, assert_same_parameters

SETTINGS = {
    "exact": {},
    "resident": {"host_memory": 150_000},
    "split": {"master": "split"},
    "bfloat16": {"state_dtype": "bfloat16"},
    "int8": {"state_dtype": "int8"},
}
KINDS = ("pt", "hf", "safetensors", "dcp")


def sealed(directory: Path, case: Case, settings: dict[str, Any], steps: int = 3, drives: int = 1):
    """Train for some steps, and seal; returns the pair and the path of its checkpoint."""
    places = [str(directory / f"drive{n}") for n in range(drives)]
    shares = {"drives": offload.DriveTuning(shares=(1,) * drives)} if drives > 1 else {}
    cut = Cut(3 * 4096, 3, settings={**settings, **shares})
    pair = Pair(case, cut, None, places)
    for step in range(1, steps + 1):
        pair.step_live(step)
        pair.step_expected(step)
    return pair, pair.optimizer.checkpoint({"epoch": 1}).result().path


def export(path: str, destination: Path, kind: str) -> list[tuple[int, int]]:
    told: list[tuple[int, int]] = []
    with offload.open_checkpoint(path) as opened:
        export_checkpoint(opened, destination, kind, progress=lambda a, b: told.append((a, b)))
    return told


def load(destination: Path, kind: str, names: list[str]) -> dict[str, Any]:
    """Load an export with its own loader, as ``model``, ``optimizer`` by number, and ``master``."""
    number = {name: n for n, name in enumerate(names)}
    if kind == "pt":
        found = torch.load(destination, weights_only=True)
        found["master"] = found["optimizer"].pop("master")
        return found
    if kind == "dcp":
        # What DCP itself turns its directories into: everything, by its own planner.
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

        dcp_to_torch_save(destination, f"{destination}.whole")
        found = torch.load(f"{destination}.whole", weights_only=True)
        optim = found["optim"]
        return {
            "model": found["model"],
            "optimizer": {
                "state": {number[n]: s for n, s in optim["state"].items()},
                "param_groups": [
                    {**g, "params": [number[n] for n in g["params"]]} for g in optim["param_groups"]
                ],
            },
            "master": {number[n]: m for n, m in found.get("master", {}).items()},
        }
    files = {f.stem: safetensors.torch.load_file(f) for f in destination.glob("*.safetensors")}
    masters = {number[n]: m for n, m in files.get("master", {}).items()}
    if kind == "hf":
        optimizer = torch.load(destination / "optimizer.pt", weights_only=True)
        return {"model": files["model"], "optimizer": optimizer, "master": masters}
    document = json.loads((destination / "optimizer.json").read_text())
    state: dict[int, dict[str, Any]] = {}
    for name, scalars in document["state"].items():
        state[number[name]] = {k: torch.tensor(v) for k, v in scalars.items()}
        for array, tensors in files.items():
            if name in tensors and array not in ("model", "master"):
                state[number[name]][array] = tensors[name]
    groups = [{**g, "params": [number[n] for n in g["params"]]} for g in document["param_groups"]]
    return {
        "model": files["model"],
        "optimizer": {"state": state, "param_groups": groups},
        "master": masters,
    }


def names_in_order(pair: Pair) -> list[str]:
    names = {p: n for n, p in pair.live.named_parameters()}
    return [names[p] for g in pair.optimizer.param_groups for p in g["params"]]


def assert_is(found: dict[str, Any], full: dict[str, Any], pair: Pair) -> None:
    """Compare an export with what the optimizer itself says, and the live model."""
    for name, tensor in pair.live.state_dict().items():
        if name in found["model"]:  # safetensors has tied tensors once
            assert_same_bits(found["model"][name], tensor, name)
    assert {n for n, _ in pair.live.named_parameters()} <= set(found["model"])
    assert found["optimizer"]["state"].keys() == full["state"].keys()
    for number, state in full["state"].items():
        assert found["optimizer"]["state"][number].keys() == state.keys()
        for name, value in state.items():
            other = found["optimizer"]["state"][number][name]
            assert_same_bits(other, value, f"{name} of {number}")
    assert found["master"].keys() == full["master"].keys()
    for number, master in full["master"].items():
        assert_same_bits(found["master"][number], master, f"master of {number}")
    for group, expected in zip(
        found["optimizer"]["param_groups"], full["param_groups"], strict=True
    ):
        group.pop("param_names", None)
        found_group = {
            key: tuple(value["tuple"]) if isinstance(value, dict) else value
            for key, value in group.items()
        }
        assert found_group == expected


@pytest.mark.parametrize(
    ("case", "stored", "kind", "drives"),
    [
        ("adamw", "exact", "pt", 1),
        ("adamw", "exact", "hf", 3),
        ("adamw", "exact", "safetensors", 1),
        ("adamw", "exact", "dcp", 3),
        ("adamw", "resident", "safetensors", 1),
        ("adamw", "split", "dcp", 1),
        ("adamw", "bfloat16", "hf", 1),
        ("adamw", "int8", "pt", 1),
        ("adamw", "int8", "safetensors", 1),
        ("sgd-nesterov", "exact", "pt", 1),
        ("nadam", "exact", "hf", 1),
        ("asgd", "exact", "dcp", 1),
    ],
)
def test_every_stored_format_and_every_format_of_files(tmp_path, case, stored, kind, drives):
    pair, path = sealed(tmp_path, CASES[case], SETTINGS[stored], drives=drives)
    full = pair.optimizer.full_state_dict()
    destination = tmp_path / "export"
    told = export(path, destination, kind)
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1]
    assert_is(load(destination, kind, names_in_order(pair)), full, pair)
    assert not Path(f"{destination}.partial").exists()
    pair.optimizer.close()


@pytest.mark.parametrize("kind", ["hf", "dcp"])
def test_plain_torch_trains_on_with_the_same_bits(tmp_path, kind):
    """Mixed dtypes in every group: the order of parameters is the optimizer's, not the files'."""
    pair, path = sealed(tmp_path, CASES["adamw-amsgrad"], {})
    export(path, tmp_path / "export", kind)
    found = load(tmp_path / "export", kind, names_in_order(pair))
    fresh = Pair(pair.case, Cut(1 << 20, 2), None, str(tmp_path / "unused"), expected=Mixed(seed=4))
    fresh.optimizer.close()
    fresh.expected.load_state_dict(found["model"], strict=False)
    for group in found["optimizer"]["param_groups"]:
        group["betas"] = (
            tuple(group["betas"]["tuple"]) if isinstance(group["betas"], dict) else group["betas"]
        )
    fresh.reference.inner.load_state_dict(found["optimizer"])
    for number, live in enumerate(numbered(fresh)):
        master = fresh.reference.masters[live]
        master.data.copy_(found["master"].get(number, live.detach()))
        if number in found["optimizer"]["state"]:
            fresh.reference.started.add(live)
    for step in range(4, 8):
        pair.step_expected(step)
        fresh.step_expected(step)
    assert_same_parameters(fresh.expected.named_parameters(), pair.expected.named_parameters())
    pair.optimizer.close()


@pytest.mark.parametrize("kind", ["dcp", "safetensors"])
def test_state_of_a_parameter_that_is_in_no_group(tmp_path, kind):
    """torch's state dicts have no place for it; a file for each state array does."""
    pair, _ = sealed(tmp_path, CASES["adamw"], {})
    group = pair.optimizer.param_groups[0]["params"]
    group.remove(pair.live.matrix)
    pair.step_live(4)
    path = pair.optimizer.checkpoint({"epoch": 2}).result().path
    export(path, tmp_path / "out", kind)
    names = [*names_in_order(pair), "matrix"]
    number = len(names) - 1
    found = load(tmp_path / "out", kind, names)
    assert "matrix" in found["model"]
    assert (number in found["optimizer"]["state"]) == (kind == "safetensors")
    assert len(found["optimizer"]["state"]) > 10


@pytest.mark.parametrize("kind", KINDS)
def test_the_number_of_steps_goes_along(tmp_path, kind):
    """Also where the last steps applied no gradient, which no parameter has counted."""
    parameter = torch.nn.Parameter(torch.ones(30))
    options = offload.Options(allow_volatile=True)
    with offload.AdamW(
        [("weight", parameter)], directory=tmp_path / "run", options=options
    ) as optimizer:
        for step in range(6):
            parameter.grad = torch.ones(30) if step < 2 else None
            optimizer.step()
        path = optimizer.checkpoint().result().path
    export(path, tmp_path / "out", kind)
    if kind == "safetensors":
        assert json.loads((tmp_path / "out" / "optimizer.json").read_text())["step"] == 6
        return
    with import_checkpoint(
        tmp_path / "out", tmp_path / "again", torch.optim.AdamW, options=options
    ) as imported:
        assert imported.step == 6


@pytest.mark.parametrize(
    ("kind", "file"),
    [
        ("pt", "exp_avg.safetensors"),
        ("hf", "model.safetensors"),
        ("safetensors", "exp_avg.safetensors"),
        ("dcp", "model.safetensors"),
    ],
)
def test_a_damaged_checkpoint_leaves_nothing_behind(tmp_path, kind, file):
    pair, path = sealed(tmp_path, CASES["adamw"], {}, steps=1)
    pair.optimizer.close()
    with open(f"{path}/{file}", "r+b") as damaged:
        damaged.seek(20_001)
        byte = damaged.read(1)[0]
        damaged.seek(20_001)
        damaged.write(bytes([byte ^ 4]))
    with pytest.raises(DamagedError, match=file):
        export(path, tmp_path / "export", kind)
    assert [n for n in os.listdir(tmp_path) if n.startswith("export")] == []


def test_what_cannot_be_exported_to_is_refused(tmp_path):
    pair, path = sealed(tmp_path, CASES["adamw"], {}, steps=1)
    (tmp_path / "export").write_text("mine")
    with pytest.raises(StoreError, match="it already exists"):
        export(path, tmp_path / "export", "pt")
    assert (tmp_path / "export").read_text() == "mine"
    with pytest.raises(ValueError, match="hf, safetensors, pt, dcp, got 'onnx'"):
        export(path, tmp_path / "other", "onnx")
    with pytest.raises(StoreError, match="does not exist; create it"):
        export(path, tmp_path / "no" / "export", "pt")
    pair.optimizer.close()
