"""The Trainer on two processes; see `tests.integrations.rank_jobs`."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer_callback import TrainerState

import offload
from offload.integrations.transformers import OffloadCallback, create_optimizer, latest_checkpoint
from tests.integrations import fsdp_on_cpu
from tests.integrations.training import (
    COMPARED,
    Sentences,
    StopBefore,
    StoppedError,
    arguments,
    make_model,
)
from tests.limits import AGREEMENT_S

OPTIONS = offload.Options(
    chunk_bytes=4096, drives=offload.DriveTuning(calibrate=False), agreement_timeout_s=AGREEMENT_S
)


def run(
    root: Path,
    *,
    kind: str = "ddp",
    dtype: str = "bfloat16",
    settings: dict[str, Any] | None = None,
    stop_before: int = 0,
    kill_at: int = 0,
    resume: bool = False,
    how: str = "factory",
    overlap: str | None = None,
) -> dict[str, Any]:
    """Train, and return what was logged.

    Args:
        root: Directory of the folders and of the store.
        kind: ``ddp``, ``fsdp1``, or the type of FSDP2's state dicts.
        dtype: Of the parameters.
        settings: Further arguments of the Trainer.
        stop_before: Step before which the training fails.
        kill_at: Step whose save never ends: all processes are killed, when it has been sealed.
        resume: Whether to continue from the newest folder.
        how: How the optimizer is made: ``factory``, ``given``, ``class`` or ``memory``.
        overlap: As in `offload.Options`.
    """
    sharding: dict[str, Any] = {}
    if kind != "ddp":
        fsdp_on_cpu.allow()
        config = {"transformer_layer_cls_to_wrap": ["GPT2Block"]}
        more = {"version": 1} if kind == "fsdp1" else {"state_dict_type": kind}
        sharding = {"fsdp": True, "fsdp_config": {**config, **more}}
    args = arguments(
        root,
        **{
            "gradient_accumulation_steps": 2,
            "max_grad_norm": 0.5,
            "lr_scheduler_type": "cosine",
            "save_total_limit": 2,
            "optim": "adamw_torch",
            "ddp_find_unused_parameters": False,
            **sharding,
            **(settings or {}),
        },
    )
    model = make_model(getattr(torch, dtype))
    offloading = OffloadCallback(close=True)
    directory = root / "run"
    made: dict[str, Any] = {}
    chosen = offload.Options(**{**_fields(OPTIONS), "overlap": overlap})
    if how == "factory":
        made["optimizer_cls_and_kwargs"] = offloading.optimizer_cls_and_kwargs(
            directory=directory, options=chosen
        )
    elif how == "given":
        optimizer = create_optimizer(model, args, directory=directory, options=chosen)
        made["optimizers"] = (optimizer, None)
    elif how == "class":
        kwargs = {"directory": directory, "options": chosen, "lr": args.learning_rate}
        made["optimizer_cls_and_kwargs"] = (offload.AdamW, kwargs)
    callbacks: list[Any] = [] if how == "memory" else [offloading]
    if stop_before:
        callbacks.append(StopBefore(stop_before))
    if kill_at:
        _kill_within_save(args.process_index, kill_at)
    trainer = Trainer(
        model,
        args,
        train_dataset=Sentences(40),
        eval_dataset=Sentences(4),
        callbacks=callbacks,
        **made,
    )
    newest = latest_checkpoint(args.output_dir or "", directory) if resume else None
    stopped = False
    try:
        trainer.train(resume_from_checkpoint=newest)
    except StoppedError:
        stopped = True
    history = [
        {key: entry[key] for key in COMPARED if key in entry}
        for entry in trainer.state.log_history
        if "loss" in entry or "eval_loss" in entry
    ]
    return {
        "history": history,
        "stopped": stopped,
        "resumed": newest and Path(newest).name,
        "parameters": [_sum(p) for p in trainer.model.parameters()],
    }


def _fields(options: offload.Options) -> dict[str, Any]:
    names = ("chunk_bytes", "drives", "agreement_timeout_s")
    return {name: getattr(options, name) for name in names}


def _sum(parameter: Any) -> float:
    whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return float(whole.detach().double().sum())


def _kill_within_save(rank: int, step: int) -> None:
    """Kill rank 0 where it writes the Trainer's state, the last file; rank 1 then fails."""
    save = TrainerState.save_to_json

    def kill(self: TrainerState, path: str) -> None:
        if rank == 0 and self.global_step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        save(self, path)

    TrainerState.save_to_json = kill
