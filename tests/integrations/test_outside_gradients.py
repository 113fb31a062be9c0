"""Gradients and parameters on the drive in a Trainer, accelerate and Lightning: torch's numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from accelerate import Accelerator
from transformers import Trainer

import offload
from offload.gradients import mover
from offload.integrations.lightning import OffloadCallback
from tests.integrations.lightning_runs import (
    BATCHES,
    Model,
    fit,
    in_memory,
    logged,
    on_ssd,
    parameters,
)
from tests.integrations.training import (
    Case,
    Sentences,
    StopBefore,
    StoppedError,
    arguments,
    make_model,
)
from tests.numerics.reference import assert_same_bits, assert_same_parameters


@pytest.fixture(autouse=True)
def everything_is_spilled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models of these tests are too small for a drive."""
    monkeypatch.setattr(mover, "_MIN_SPILLED_BYTES", 1)


def test_a_trainer_accumulates_clips_and_logs_the_norm(tmp_path: Path) -> None:
    settings = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5}
    found = Case(settings, dtype=torch.float32, gradients="drive").run(tmp_path)
    plain = Trainer(
        make_model(torch.float32),
        arguments(tmp_path / "plain", save_strategy="no", optim="adamw_torch", **settings),
        train_dataset=Sentences(),
    )
    plain.train()
    expected = [entry for entry in plain.state.log_history if "loss" in entry]
    for name in ("loss", "grad_norm"):
        assert [e[name] for e in found.history] == [e[name] for e in expected]
    for name, parameter in plain.model.named_parameters():
        assert_same_bits(found.parameters[name], parameter, name)


@pytest.mark.parametrize("parameters", ["host", "drive"])
def test_a_trainer_is_stopped_and_resumed(parameters: str, tmp_path: Path) -> None:
    settings = {
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "eval_strategy": "steps",
        "eval_steps": 2,
    }
    plain = Case(settings, layers=3).run(tmp_path / "plain")
    outside = Case(settings, layers=3, gradients="drive", parameters=parameters)
    with pytest.raises(StoppedError):
        outside.run(tmp_path / "run", StopBefore(5))
    found = outside.run(tmp_path / "run", resume=True)
    assert found.history == plain.history
    assert_same_parameters(found.parameters.items(), plain.parameters.items())


OUTSIDE: list[dict[str, Any]] = [{}, {"parameters": "drive", "blocks": "*"}]


@pytest.mark.parametrize("parameters", OUTSIDE, ids=["gradients", "parameters"])
def test_accelerate_accumulates_and_clips(parameters: dict[str, Any], tmp_path: Path) -> None:
    results = []
    for is_ours in (True, False):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(6, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
        made: Any = torch.optim.AdamW(model.parameters(), lr=0.02)
        if is_ours:
            options = offload.Options(gradients="drive", chunk_bytes=4096, **parameters)
            made = offload.AdamW(
                model.parameters(),
                lr=0.02,
                directory=tmp_path / "run",
                model=model,
                options=options,
            )
        prepared, optimizer = accelerator.prepare(model, made)
        norms = []
        for batch in range(6):
            with accelerator.accumulate(prepared):
                x = torch.randn(8, 6, generator=torch.Generator().manual_seed(batch))
                accelerator.backward(prepared(x).square().mean())
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(prepared.parameters(), 0.1))
                optimizer.step()
                optimizer.zero_grad()
        results.append(({n: p.detach().clone() for n, p in model.named_parameters()}, norms))
        if is_ours:
            made.close()
    (ours, norms), (torchs, expected) = results
    assert len(norms) == 3
    assert [n.item() for n in norms] == [n.item() for n in expected]
    assert_same_parameters(ours.items(), torchs.items())


@pytest.mark.parametrize("place", OUTSIDE, ids=["gradients", "parameters"])
def test_lightning_accumulates_and_clips(place: dict[str, Any], tmp_path: Path) -> None:
    found = []
    if place:
        place = {"parameters": "drive", "blocks": ["layers.*"]}
    options = offload.Options(gradients="drive", chunk_bytes=4096, **place)
    for make in (on_ssd(tmp_path / "run", options=options), in_memory):
        model = fit(
            tmp_path / make.__name__, make, max_epochs=2, save=False,
            accumulate_grad_batches=2, gradient_clip_val=0.3,
        )  # fmt: skip
        found.append(model)
    assert logged(tmp_path / "make") == logged(tmp_path / "in_memory")
    assert_same_parameters(parameters(found[0]), parameters(found[1]))


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_lightning_is_stopped_and_resumed(tmp_path: Path) -> None:
    plain = fit(tmp_path / "plain", on_ssd(tmp_path / "plain/run"))
    options = offload.Options(
        gradients="drive", parameters="drive", blocks=["layers.*"], chunk_bytes=4096
    )
    stopped, make = tmp_path / "stopped", on_ssd(tmp_path / "stopped/run", options=options)
    fit(stopped, make, stop_after=3 * BATCHES - 2)
    OffloadCallback().setup(pl.Trainer(logger=False), Model(in_memory), "fit")  # closes it
    resumed = fit(stopped, make, ckpt_path=stopped / "files/last.ckpt")
    assert logged(stopped) == logged(tmp_path / "plain")
    assert_same_parameters(parameters(resumed), parameters(plain))
