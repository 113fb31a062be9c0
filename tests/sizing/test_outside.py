"""Gradients and parameters outside of the GPU: what they need, and which blocks are found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import offload
from offload.sizing import Cluster, Machine, Plan, Run, size
from offload.sizing.figures import Fit
from tests.sizing.test_sources import LLAMA, LLAMA_PARAMETERS

BLOCK = 4 * 32 * 32 + 3 * 32 * 48 + 2 * 32
"""Number of parameters of a block of `LLAMA`."""

FIRST = ["all in memory", "state on drives", 'gradients="host"', 'overlap="backward"']
BLOCKS = ['parameters="host"', 'parameters="drive"']


def ways(plan: Plan) -> dict[str, Fit]:
    return {fit.name: fit for fit in plan.fits}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 10}))
    return tmp_path


def test_a_number_of_parameters_says_nothing_of_blocks() -> None:
    assert [*ways(size(7e9))] == FIRST


def test_several_gpus_have_state_on_drives_only(llama: Path) -> None:
    assert [*ways(size(llama, cluster=Cluster(gpus=2)))] == FIRST[:2]


def test_with_several_micro_batches_backward_frees_no_gradients(llama: Path) -> None:
    found = ways(size(llama, run=Run(micro_batches=2)))
    assert [*found] == [*FIRST[:3], *BLOCKS]


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_bytes_of_each_way(llama: Path, micro_batches: int) -> None:
    plan = size(llama, run=Run(micro_batches=micro_batches))
    found, outside = ways(plan), LLAMA_PARAMETERS - 2 * BLOCK
    number = outside + 10 * BLOCK
    assert plan.num_parameters == number
    on_gpu = 2 * (outside + 3 * BLOCK)
    expected = {
        "state on drives": (4 * number, 0, 12 * number, 12 * number),
        'gradients="host"': (2 * number, 2 * number, 12 * number, 12 * number),
        'parameters="host"': (on_gpu, 2 * 10 * BLOCK + 2 * number, 12 * number, 12 * number),
        'parameters="drive"': (
            on_gpu,
            2 * BLOCK,
            (14 + 6 * micro_batches) * number,
            (14 + 2 * micro_batches) * number,
        ),
    }
    for name, figures in expected.items():
        fit = found[name]
        bytes_ = (fit.gpu_bytes, fit.host_bytes, fit.step_read_bytes, fit.step_written_bytes)
        assert bytes_ == figures, name


def test_depth_changes_nothing_on_the_gpu(llama: Path, tmp_path: Path) -> None:
    short = ways(size(llama))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 40}))
    deep = ways(size(llama, machine=Machine(gpu_memory=24e9)))
    for name in BLOCKS:
        assert deep[name].gpu_bytes == short[name].gpu_bytes
        assert deep[name].largest is None
    assert deep[BLOCKS[1]].host_bytes == short[BLOCKS[1]].host_bytes


def test_the_drives_take_what_the_slowest_of_their_rates_takes(llama: Path) -> None:
    for rates, expected in (
        ({"read_gbps": 2.0, "write_gbps": 1.0}, 16 / 1),
        ({"read_gbps": 1.0, "write_gbps": 1.0}, 20 / 1),
        ({"read_gbps": 2.0, "write_gbps": 2.0, "mixed_gbps": 1.5}, 36 / 1.5),
        ({"mixed_gbps": 3.0}, 36 / 3),
        ({"read_gbps": 2.0}, None),
    ):
        plan = size(llama, machine=Machine(**rates))
        found = ways(plan)[BLOCKS[1]].drives_s
        if expected is None:
            assert found is None
        else:
            assert found == pytest.approx(expected * plan.num_parameters / 1e9)
            assert ways(plan)["state on drives"].drives_s == plan.steps[1].seconds


def test_drives_live_shorter_with_all_on_them(llama: Path) -> None:
    plan = size(llama, machine=Machine(drive_tbw=1e15))
    number = plan.num_parameters
    life = {name: fit.steps_of_life for name, fit in ways(plan).items()}
    assert life["all in memory"] is None
    assert life["state on drives"] == life['gradients="host"'] == plan.steps_of_life
    assert plan.steps_of_life == pytest.approx(1e15 / (14 * number))
    assert life[BLOCKS[1]] == pytest.approx(1e15 / (16 * number))  # a seal writes no parameters


def test_host_memory_that_is_too_small_is_said() -> None:
    found = ways(size(7e9, machine=Machine(gpu_memory=24e9, host_memory=13e9)))
    assert found['gradients="host"'].verdict == "no host memory"
    assert found['overlap="backward"'].verdict == "fits"


class Gate(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)
        self.parts = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in [self.inner, *self.parts]:
            x = part(x)
        return x


class Listed(torch.nn.Module):
    """Blocks with lists in them, beside a list of one layer, and parameters outside of all."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = torch.nn.ModuleList(Gate() for _ in range(5))
        self.one = torch.nn.ModuleList([torch.nn.Linear(8, 8)])
        self.scale = torch.nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for gate in [*self.gates, *self.one]:
            x = gate(x)
        return x * self.scale


def test_the_blocks_are_those_that_training_finds(tmp_path: Path) -> None:
    """What a run really loads is as large as what is computed."""
    model = Listed().bfloat16()
    options = offload.Options(parameters="host")
    with offload.AdamW(
        model.parameters(), directory=tmp_path / "run", model=model, options=options
    ) as optimizer:
        model(torch.randn(2, 8).bfloat16()).float().sum().backward()
        optimizer.step()
        optimizer.checkpoint().result()
        stats = optimizer.stats()
    plan = size(tmp_path / "run")
    outside = sum(p.nbytes for p in [*model.one.parameters(), model.scale])
    block = stats.block_bytes / stats.block_loads
    assert stats.block_buffers == 3
    assert ways(plan)[BLOCKS[0]].gpu_bytes == outside + 3 * block


@pytest.mark.parametrize(
    "model",
    [
        torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)),
        torch.nn.Sequential(Gate()),
        torch.nn.Linear(4, 4),
    ],
    ids=["layers that are no blocks", "one", "none"],
)
def test_models_without_blocks_have_no_such_rows(model: Any, tmp_path: Path) -> None:
    save_file({**model.state_dict()}, tmp_path / "model.safetensors")
    assert [*ways(size(tmp_path))] == FIRST
