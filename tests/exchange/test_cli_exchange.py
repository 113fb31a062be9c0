"""The commands, each in a process of its own: nothing is carried from one to the next in memory.

These are the situations in which DeepSpeed 0.19.8's NVMe checkpoints lose state without an error:
loading into a fresh process lost both moments and the step count, and its export of FP32 weights
was wrong for most layers.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import offload
from offload.cli import main
from tests.command_line import runner
from tests.exchange.commands import Commands, commands_in
from tests.numerics.reference import assert_same_bits
from tests.stores.small import make_mixed_model, step


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    with commands_in(tmp_path_factory.mktemp("commands")) as found:
        yield found


@pytest.fixture(scope="module")
def store(commands: Commands) -> Path:
    return commands.train()


@pytest.fixture(scope="module")
def expected() -> tuple[torch.nn.Module, list[torch.Tensor], torch.optim.Optimizer]:
    """The same training by torch, with FP32 masters in memory."""
    model = make_mixed_model()
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    plain = torch.optim.AdamW(masters, lr=0.01)
    for number in range(3):
        train_plain(model, masters, plain, number)
    return model, masters, plain


def train_plain(model, masters, plain, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p, m in zip(model.parameters(), masters, strict=True):
        m.grad = torch.randn(p.shape, generator=generator).to(p.dtype).float()
    plain.step()
    with torch.no_grad():
        for p, m in zip(model.parameters(), masters, strict=True):
            p.copy_(m)


@pytest.mark.parametrize("kind", ["pt", "hf", "dcp"])
def test_moments_step_count_and_weights_survive_every_way_through_fresh_processes(
    store, commands, expected, tmp_path, kind
) -> None:
    model, masters, plain = expected
    out, again = tmp_path / "out", tmp_path / "again"
    commands.offload("export", store, out, "--to", kind, "--quiet")
    assert "step 3" in commands.offload("import", out, again, "--quiet")
    for directory in (store, again):
        mine = make_mixed_model(seed=5)
        with offload.AdamW(mine.parameters(), directory=directory, model=mine) as optimizer:
            assert optimizer.restore().step == 3
            full = optimizer.full_state_dict()
        for (name, found), wanted in zip(mine.named_parameters(), model.parameters(), strict=True):
            assert_same_bits(found.detach(), wanted.detach(), name)
        for number, master in enumerate(masters):
            state = plain.state_dict()["state"][number]
            for key, value in state.items():
                assert_same_bits(full["state"][number][key], value, f"{key} of {number}")
            assert state["step"] == 3
            if number in full["master"]:
                assert_same_bits(full["master"][number], master.detach(), f"master {number}")


def test_errors_are_one_line(store, tmp_path, monkeypatch, capsys) -> None:
    call = runner("offload", main, monkeypatch, capsys)
    (tmp_path / "out").write_text("mine")
    for arguments, message in (
        (["export", store, tmp_path / "out", "--to", "pt"], "it already exists"),
        (["import", tmp_path / "out", tmp_path / "s"], "looks like text (it begins with 'mine')"),
        (["import", "x", tmp_path / "s", "--optimizer", "Nope"], "no class 'Nope'; it has ASGD,"),
        (["import", "x", tmp_path / "s", "--optimizer", "adamw"], "'adamw'; did you mean AdamW "),
        (["import", "x", tmp_path / "s", "--optimizer", "RmsProb"], "did you mean RMSprop"),
        (["import", "x", tmp_path / "s", "--optimizer", "Optimizer"], "no class 'Optimizer'"),
    ):
        code, _, said = call(*arguments)
        assert code == 1
        assert message in said
        assert said.count("\n") == 1


def test_a_fresh_process_trains_on_with_the_bits_of_torch(store, expected, tmp_path) -> None:
    """Its commands are started by themselves, not forked by a process that has imported torch."""
    done = run("-m", "offload.cli", "export", str(store), str(tmp_path / "out"), "--to", "pt")
    assert done.returncode == 0, done.stderr
    done = run("-m", "offload.cli", "import", str(tmp_path / "out"), str(tmp_path / "again"))
    assert done.returncode == 0, done.stderr
    plain_model = make_mixed_model()
    masters = [m.detach().clone().requires_grad_() for m in expected[1]]
    plain = torch.optim.AdamW(masters, lr=0.01)
    plain.load_state_dict(expected[2].state_dict())
    mine = make_mixed_model(seed=5)
    with offload.AdamW(mine.parameters(), directory=tmp_path / "again", model=mine) as optimizer:
        optimizer.restore()
        for number in range(3, 6):
            step(optimizer, number)
            train_plain(plain_model, masters, plain, number)
    for found, wanted in zip(mine.parameters(), plain_model.parameters(), strict=True):
        assert_same_bits(found.detach(), wanted.detach(), "parameter")
