"""A Trainer run that was interrupted and resumed equals one that was not, to the bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import Trainer

import offload
from offload.integrations.transformers import latest_checkpoint
from tests.integrations.training import (
    STEPS,
    Case,
    Run,
    Sentences,
    StopBefore,
    StoppedError,
    arguments,
    make_model,
    steps,
)
from tests.numerics.reference import assert_same_bits

CASES = {
    "bf16-cosine-warmup-accumulation-clipping": Case(
        {
            "lr_scheduler_type": "cosine",
            "warmup_steps": 2,
            "gradient_accumulation_steps": 2,
            "max_grad_norm": 0.5,
        }
    ),
    "fp32-autocast-polynomial-factory": Case(
        {"bf16": True, "lr_scheduler_type": "polynomial"}, dtype=torch.float32, factory=True
    ),
    "bf16-plateau": Case(
        {
            "lr_scheduler_type": "reduce_lr_on_plateau",
            "lr_scheduler_kwargs": {"patience": 0, "threshold": 0.5},
            "eval_strategy": "steps",
            "eval_steps": 1,
            "metric_for_best_model": "loss",
        }
    ),
    "bf16-sgd-overlapped-factory": Case(
        {"optim": "sgd", "optim_args": "momentum=0.9", "max_grad_norm": 0},
        factory=True,
        overlap="forward",
    ),
}


def assert_same(found: Run, expected: Run) -> None:
    assert found.history == expected.history
    for name, parameter in expected.parameters.items():
        assert_same_bits(found.parameters[name], parameter, name)
    assert found.state["param_groups"] == expected.state["param_groups"]
    for number, state in expected.state["state"].items():
        for name, value in state.items():
            other = found.state["state"][number][name]
            assert_same_bits(torch.as_tensor(other), torch.as_tensor(value), f"{name} of {number}")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_interrupted_and_resumed(case: Case, tmp_path: Path) -> None:
    expected = case.run(tmp_path / "whole")
    with pytest.raises(StoppedError):
        case.run(tmp_path / "cut", StopBefore(6))  # the last save was of step 3
    found = case.run(tmp_path / "cut", resume=True)
    assert steps(found.history) == list(range(1, STEPS + 1))
    assert found.stats.steps == STEPS - 3
    assert_same(found, expected)


def test_resumed_in_the_same_process_by_the_same_trainer(tmp_path: Path) -> None:
    case = Case()
    expected = case.run(tmp_path / "whole")
    stop = StopBefore(5)
    with case.trainer(tmp_path / "cut", stop) as trainer:
        with pytest.raises(StoppedError):
            trainer.train()
        trainer.remove_callback(stop)
        trainer.train(resume_from_checkpoint=True)
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses == [entry["loss"] for entry in expected.history]


def test_losses_are_those_of_plain_torch(tmp_path: Path) -> None:
    """FP32 parameters are their own masters, so that plain torch can be compared with."""
    settings = {"optim": "adamw_torch", "gradient_accumulation_steps": 2}
    found = Case(settings, dtype=torch.float32).run(tmp_path)
    plain = Trainer(
        make_model(torch.float32),
        arguments(tmp_path / "plain", save_strategy="no", **settings),
        train_dataset=Sentences(),
    )
    plain.train()
    expected = [entry for entry in plain.state.log_history if "loss" in entry]
    assert [e["loss"] for e in found.history] == [e["loss"] for e in expected]
    assert [e["grad_norm"] for e in found.history] == [e["grad_norm"] for e in expected]
    for name, parameter in plain.model.named_parameters():
        assert_same_bits(found.parameters[name], parameter, name)


def test_a_run_with_plain_torch_is_taken_over(tmp_path: Path) -> None:
    """Its `optimizer.pt` has the state itself, which is streamed into the store."""

    def plain(resume: bool) -> list[float]:
        model, args = make_model(torch.float32), arguments(tmp_path, optim="adamw_torch")
        trainer = Trainer(model, args, train_dataset=Sentences())
        trainer.train(resume_from_checkpoint=resume)
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    expected = plain(resume=False)
    for number in (6, 7):
        shutil.rmtree(tmp_path / f"out/checkpoint-{number}")
    newest = latest_checkpoint(tmp_path / "out", tmp_path / "run")
    assert newest == str(tmp_path / "out/checkpoint-3")
    found = Case({"optim": "adamw_torch"}, dtype=torch.float32).run(tmp_path, resume=newest)
    assert [entry["loss"] for entry in found.history] == expected
    assert found.stats.steps == STEPS - 3
    assert [c.step for c in offload.list_checkpoints(tmp_path / "run") if c.pins] == [6, 7]
