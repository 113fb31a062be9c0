"""The Trainer's just-in-time checkpoints (`enable_jit_checkpoint`): what SIGTERM makes it save."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

from offload.integrations.transformers import latest_checkpoint
from tests.integrations.training import Case

STEP = 2
COMMON = {"max_steps": 4, "gradient_accumulation_steps": 2, "save_strategy": "steps"}
WHOLE = Case({**COMMON, "save_steps": 100})
STOPPED = Case({**WHOLE.arguments, "enable_jit_checkpoint": True})


class WithoutDropout(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, **kwargs):
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0


class Terminated(TrainerCallback):
    """Asks for a checkpoint as the handler of SIGTERM does, which waits for seconds before."""

    trainer: Trainer

    def __init__(self, *, within_a_step: bool) -> None:
        self.within_a_step = within_a_step

    def on_substep_end(self, args, state, control, **kwargs):
        if self.within_a_step and state.global_step == STEP:
            self.ask()

    def on_optimizer_step(self, args, state, control, **kwargs):
        if not self.within_a_step and state.global_step == STEP - 1:
            self.ask()

    def ask(self) -> None:
        (jit,) = (
            callback
            for callback in self.trainer.callback_handler.callbacks
            if isinstance(callback, JITCheckpointCallback)
        )
        jit.jit_manager.is_checkpoint_requested = True


@pytest.mark.parametrize("within_a_step", [False, True])
def test_goes_on_to_the_same_bits(tmp_path: Path, within_a_step: bool) -> None:
    """Within a step, the Trainer saves the random states after forwards that are done again."""
    callbacks = [WithoutDropout()] if within_a_step else []
    whole = WHOLE.run(tmp_path / "whole", *callbacks)
    terminated = Terminated(within_a_step=within_a_step)
    with STOPPED.trainer(tmp_path, *callbacks, terminated) as trainer:
        terminated.trainer = trainer
        trainer.train()
    folder = latest_checkpoint(tmp_path / "out", tmp_path / "run")
    assert folder == str(tmp_path / f"out/checkpoint-{STEP}")
    again = WHOLE.run(tmp_path, *callbacks, resume=folder)
    for name, parameter in whole.parameters.items():
        assert torch.equal(parameter, again.parameters[name]), name
    losses = [[h["loss"] for h in run.history if h["step"] > STEP] for run in (whole, again)]
    assert losses[0] == losses[1]
    assert len(losses[1]) == COMMON["max_steps"] - STEP
