"""Small trainings with the real Trainer, to be compared with one another to the bit.

The Trainer makes its own loop, and wants a model of its library: no builder of `tests.stores` has
either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import offload
from gds import Backend
from offload.integrations.transformers import OffloadCallback, create_optimizer

STEPS, SAVE_STEPS = 7, 3
LENGTH, WORDS = 6, 32
COMPARED = ("loss", "eval_loss", "grad_norm", "learning_rate", "epoch", "step")


class StoppedError(Exception):
    """What ends a training before its time."""


class StopBefore(TrainerCallback):
    """Fails when a step is about to begin."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step - 1:
            raise StoppedError


class Sentences(torch.utils.data.Dataset):
    """Random tokens, the same ones each time."""

    def __init__(self, count: int = 20) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = torch.randint(0, WORDS, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": words, "labels": words}


def make_model(dtype: torch.dtype = torch.bfloat16) -> GPT2LMHeadModel:
    """Return a GPT-2 with tied weights, and with dropout: random states must be restored, too."""
    return make_deeper(dtype, 1)


def make_deeper(dtype: torch.dtype, layers: int) -> GPT2LMHeadModel:
    """Return `make_model` with several layers; a Trainer's ``model_init`` takes one argument."""
    torch.manual_seed(7)
    config = GPT2Config(
        vocab_size=WORDS,
        n_positions=LENGTH,
        n_embd=16,
        n_layer=layers,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
    )
    return GPT2LMHeadModel(config).to(dtype)


def arguments(root: Path, **settings: Any) -> TrainingArguments:
    return TrainingArguments(
        **{
            "output_dir": str(root / "out"),
            "max_steps": STEPS,
            "save_steps": SAVE_STEPS,
            "per_device_train_batch_size": 2,
            "logging_steps": 1,
            "learning_rate": 0.02,
            "weight_decay": 0.1,
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
            **settings,
        }
    )


@dataclass
class Run:
    """What a training has left behind."""

    history: list[dict[str, float]]
    parameters: dict[str, torch.Tensor]
    state: Mapping[str, Any]
    trainer: Trainer
    stats: offload.Stats


@dataclass
class Case:
    """How to train."""

    arguments: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16
    layers: int = 1
    factory: bool = False
    optimizer: dict[str, Any] = field(default_factory=dict)
    overlap: str | None = None
    gradients: str | None = None
    parameters: str | None = None
    backend: Backend | None = None
    callback: dict[str, Any] = field(default_factory=dict)

    def run(
        self,
        root: Path,
        *callbacks: TrainerCallback,
        resume: bool | str | None = None,
        discard_newer: bool = False,
    ) -> Run:
        """Train in a directory, as a new process would: model, store and Trainer made anew."""
        with self.trainer(root, *callbacks, discard_newer=discard_newer) as trainer:
            trainer.train(resume_from_checkpoint=resume)
            optimizer = trainer.optimizer.optimizer
            parameters = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
            stats = optimizer.stats()
            history = [
                {key: entry[key] for key in COMPARED if key in entry}
                for entry in trainer.state.log_history
                if "loss" in entry or "eval_loss" in entry
            ]
            return Run(history, parameters, optimizer.full_state_dict(), trainer, stats)

    @contextmanager
    def trainer(
        self, root: Path, *callbacks: TrainerCallback, discard_newer: bool = False
    ) -> Iterator[Trainer]:
        """Make a Trainer whose store is closed at the end."""
        model, args = make_deeper(self.dtype, self.layers), arguments(root, **self.arguments)
        offloading = OffloadCallback(discard_newer=discard_newer, **self.callback)
        options = offload.Options(
            chunk_bytes=4096,
            overlap=self.overlap,
            gradients=self.gradients,
            parameters=self.parameters,
            backend=self.backend,
            allow_volatile=self.backend is not None,
        )
        settings = {"directory": root / "run", "options": options, **self.optimizer}
        if self.factory:
            how: dict[str, Any] = {
                "optimizer_cls_and_kwargs": offloading.optimizer_cls_and_kwargs(**settings)
            }
        else:
            how = {"optimizers": (create_optimizer(model, args, **settings), None)}
        trainer = Trainer(
            model,
            args,
            train_dataset=Sentences(),
            eval_dataset=Sentences(4),
            callbacks=[offloading, *callbacks],
            **how,
        )
        try:
            yield trainer
        finally:
            optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
            if optimizer is not None:
                optimizer.close()


def steps(history: list[dict[str, float]]) -> list[int]:
    return [entry["step"] for entry in history if "loss" in entry]
