"""`offload.export_checkpoint` and `offload.import_checkpoint`: the commands, from Python."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import offload
from offload.cli import main
from tests.command_line import runner
from tests.numerics.reference import assert_same_bits
from tests.stores.small import make_mixed_model, step

STEPS = 3


@pytest.fixture
def plain() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and its FP32 state, trained by torch with masters in memory."""
    model = make_mixed_model()
    masters = {name: p.detach().float().requires_grad_() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(list(masters.items()), lr=0.01)
    for number in range(STEPS):
        generator = torch.Generator().manual_seed(number)
        for name, p in model.named_parameters():
            masters[name].grad = torch.randn(p.shape, generator=generator).to(p.dtype).float()
        optimizer.step()
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(masters[name])
    return model, optimizer


@pytest.fixture
def store(tmp_path: Path) -> Path:
    model = make_mixed_model()
    with offload.AdamW(
        model.named_parameters(), lr=0.01, directory=tmp_path / "run", model=model
    ) as optimizer:
        for number in range(STEPS):
            step(optimizer, number)
        optimizer.checkpoint().result()
    return tmp_path / "run"


def test_torch_loads_what_it_exports(store, plain, tmp_path) -> None:
    model, optimizer = plain
    told: list[tuple[int, int]] = []
    with offload.open_checkpoint(store) as checkpoint:
        offload.export_checkpoint(
            checkpoint, tmp_path / "out.pt", "pt", progress=lambda *now: told.append(now)
        )
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert found["step"] == STEPS
    for name, value in model.state_dict().items():
        assert_same_bits(found["model"][name], value, name)
    for number, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            assert_same_bits(found["optimizer"]["state"][number][key], value, key)
    assert told[-1][0] == told[-1][1] > 0


def test_safetensors_loads_what_it_exports(store, plain, tmp_path) -> None:
    model, optimizer = plain
    with offload.open_checkpoint(store) as checkpoint:
        offload.export_checkpoint(checkpoint, str(tmp_path / "out"), "safetensors")
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name, value in model.state_dict().items():
        assert_same_bits(found[name], value, name)
    moments = load_file(tmp_path / "out" / "exp_avg.safetensors")
    for (name, _), state in zip(
        model.named_parameters(), optimizer.state_dict()["state"].values(), strict=True
    ):
        assert_same_bits(moments[name], state["exp_avg"], name)


@pytest.mark.parametrize("kind", ["pt", "hf", "safetensors"])
def test_the_command_writes_the_same_bytes(store, tmp_path, kind, monkeypatch, capsys) -> None:
    first, second = tmp_path / "first" / "out", tmp_path / "second" / "out"
    for place in (first, second):
        place.parent.mkdir()
    with offload.open_checkpoint(store) as checkpoint:
        offload.export_checkpoint(checkpoint, first, kind)
    call = runner("offload", main, monkeypatch, capsys)
    assert call("export", store, second, "--to", kind, "--quiet")[0] == 0
    written = [file for file in (first, *first.rglob("*")) if file.is_file()]
    assert written
    for file in written:
        assert file.read_bytes() == (second / file.relative_to(first)).read_bytes(), file.name


def test_a_model_in_a_file_of_its_own_is_imported_and_gone_on_from(plain, tmp_path) -> None:
    model, optimizer = plain
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    made = offload.import_checkpoint(
        tmp_path / "optimizer.pt",
        tmp_path / "again",
        torch.optim.AdamW,
        model=tmp_path / "weights.safetensors",
        keep=offload.LastK(2),
        train_state={"epoch": 7},
    )
    manifest = json.loads((tmp_path / "again" / f"step-{STEPS:08}" / "manifest.json").read_bytes())
    assert made.step == manifest["body"]["step"] == STEPS
    with offload.open_checkpoint(made.path) as opened:
        assert opened.verify().ok
    mine = make_mixed_model(seed=5)
    with offload.AdamW(mine.parameters(), directory=tmp_path / "again", model=mine) as resumed:
        assert resumed.restore().train_state == {"epoch": 7}
        full = resumed.full_state_dict()
    for (name, found), wanted in zip(mine.named_parameters(), model.parameters(), strict=True):
        assert_same_bits(found.detach(), wanted.detach(), name)
    for number, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            assert_same_bits(full["state"][number][key], value, key)


def test_what_is_no_format_is_refused_before_anything_is_made(store, tmp_path) -> None:
    with (
        offload.open_checkpoint(store) as checkpoint,
        pytest.raises(ValueError, match="hf, safetensors, pt, dcp, got 'zip'"),
    ):
        offload.export_checkpoint(checkpoint, tmp_path / "out", "zip")  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()
