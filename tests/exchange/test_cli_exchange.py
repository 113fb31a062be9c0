"""The commands, each in a process of its own: nothing is carried from one to the next in memory.

These are the situations in which DeepSpeed 0.19.8's NVMe checkpoints lose state without an error:
loading into a fresh process lost both moments and the step count, and its export of FP32 weights
was wrong for most layers.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

import offload
from offload.cli import main
from tests.command_line import runner
from tests.exchange.commands import command, train
from tests.forking import Children
from tests.numerics.reference import assert_same_bits
from tests.stores.small import give_gradients, make_mixed_model


@pytest.fixture(scope="module")
def children():
    found = Children("tests.exchange.commands")
    yield found
    found.close()


def run(children, directory, work):
    ended = children.run(work, directory)
    assert ended.status == 0, ended.output
    return ended.output


@pytest.fixture(scope="module")
def store(children, tmp_path_factory):
    directory = tmp_path_factory.mktemp("trained")
    run(children, directory, train)
    return directory / "run"


@pytest.fixture(scope="module")
def expected() -> tuple[torch.nn.Module, list[torch.Tensor], torch.optim.Optimizer]:
    """The same training by torch, with FP32 masters in memory."""
    model = make_mixed_model()
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    names = [name for name, _ in model.named_parameters()]
    plain = torch.optim.AdamW(list(zip(names, masters, strict=True)), lr=0.01)
    for number in range(3):
        give_gradients(model.parameters(), number)
        for p, m in zip(model.parameters(), masters, strict=True):
            m.grad = p.grad.float()
        plain.step()
        with torch.no_grad():
            for p, m in zip(model.parameters(), masters, strict=True):
                p.copy_(m)
    return model, masters, plain


@pytest.mark.parametrize("kind", ["pt", "hf", "dcp"])
def test_moments_step_count_and_weights_survive_every_way_through_fresh_processes(
    store, children, expected, tmp_path, kind
):
    model, masters, plain = expected
    out, again = tmp_path / "out", tmp_path / "again"
    for arguments in (("export", store, out, "--to", kind), ("import", out, again)):
        (tmp_path / "arguments").write_text(json.dumps([*map(str, arguments), "--quiet"]))
        said = run(children, tmp_path, command)
    assert "step 3" in said
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


def test_errors_are_one_line(store, tmp_path, monkeypatch, capsys):
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


def test_a_model_in_a_file_of_its_own_is_imported_and_gone_on_from(expected, tmp_path):
    model, _, plain = expected
    torch.save(plain.state_dict(), tmp_path / "optimizer.pt")
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    made = offload.import_checkpoint(
        tmp_path / "optimizer.pt",
        tmp_path / "again",
        torch.optim.AdamW,
        model=tmp_path / "weights.safetensors",
        keep=offload.LastK(2),
        train_state={"epoch": 7},
    )
    manifest = json.loads((tmp_path / "again" / "step-00000003" / "manifest.json").read_bytes())
    assert made.step == manifest["body"]["step"] == 3
    mine = make_mixed_model(seed=5)
    with offload.AdamW(mine.parameters(), directory=tmp_path / "again", model=mine) as resumed:
        assert resumed.restore().train_state == {"epoch": 7}
        assert resumed.restore().verify().ok
        full = resumed.full_state_dict()
    for (name, found), wanted in zip(mine.named_parameters(), model.parameters(), strict=True):
        assert_same_bits(found.detach(), wanted.detach(), name)
    for number, state in plain.state_dict()["state"].items():
        for key, value in state.items():
            assert_same_bits(full["state"][number][key], value, key)
