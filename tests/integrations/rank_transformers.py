"""The Trainer on two processes; see `tests.integrations.rank_jobs`."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import TrainerState

import offload
from offload.integrations.transformers import OffloadCallback, create_optimizer, latest_checkpoint
from tests.integrations import fsdp_on_cpu
from tests.integrations.rank_jobs import OPTIONS, whole_sum
from tests.integrations.training import (
    COMPARED,
    Sentences,
    StopBefore,
    StoppedError,
    arguments,
    make_model,
)


def run(
    root: Path,
    *,
    kind: str = "ddp",
    dtype: str = "bfloat16",
    settings: dict[str, Any] | None = None,
    stop_after: int = 0,
    kill_at: int = 0,
    kill_after: int = 0,
    resume: int | bool = False,
    in_memory: bool = False,
    discard_newer: bool = False,
    how: str = "factory",
    overlap: str | None = None,
) -> dict[str, Any]:
    """Train, and return what was logged.

    Args:
        root: Directory of the folders and of the store.
        kind: ``ddp``, ``fsdp1``, or the type of FSDP2's state dicts.
        dtype: Of the parameters.
        settings: Further arguments of the Trainer.
        stop_after: Step after which the training fails.
        kill_at: Step whose save never ends: all processes are killed, when it has been sealed.
        kill_after: Step after which all processes are killed.
        resume: Step of the folder to continue from, or True for the newest.
        in_memory: Whether to train with torch's own AdamW.
        discard_newer: As for `OffloadCallback`.
        how: How the optimizer is made: ``factory``, ``given`` or ``class``.
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
            **({"save_strategy": "no"} if in_memory else {}),
            **sharding,
            **(settings or {}),
        },
    )
    model = make_model(getattr(torch, dtype))
    offloading = OffloadCallback(close=True, discard_newer=discard_newer)
    directory = root / "run"
    made: dict[str, Any] = {}
    chosen = offload.Options(**OPTIONS, overlap=overlap)
    if in_memory:
        pass
    elif how == "factory":
        made["optimizer_cls_and_kwargs"] = offloading.optimizer_cls_and_kwargs(
            directory=directory, options=chosen
        )
    elif how == "given":
        optimizer = create_optimizer(model, args, directory=directory, options=chosen)
        made["optimizers"] = (optimizer, None)
    elif how == "class":
        kwargs = {"directory": directory, "options": chosen, "lr": args.learning_rate}
        made["optimizer_cls_and_kwargs"] = (offload.AdamW, kwargs)
    callbacks: list[Any] = [] if in_memory else [offloading]
    if stop_after:
        callbacks.append(StopBefore(stop_after + 1))
    if kill_after:
        callbacks.append(_KillAfter(kill_after))
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
    newest: str | None = None
    if resume is True:
        newest = latest_checkpoint(args.output_dir or "", directory)
    elif resume:
        newest = f"{args.output_dir}/checkpoint-{resume}"
    try:
        trainer.train(resume_from_checkpoint=newest)
    except StoppedError:
        trainer.optimizer.optimizer.synchronize()
        torch.distributed.barrier()  # or the step of another rank might still need this one
    losses: dict[int, list[dict[str, float]]] = {}
    for entry in trainer.state.log_history:
        if "loss" in entry or "eval_loss" in entry:
            found = {key: entry[key] for key in COMPARED if key in entry}
            losses.setdefault(entry["step"], []).append(found)
    return {
        "losses": losses,
        "resumed": newest and Path(newest).name,
        "parameters": [whole_sum(p) for p in trainer.model.parameters()],
    }


class _KillAfter(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def _kill_within_save(rank: int, step: int) -> None:
    """Kill rank 0 where it writes the Trainer's state, the last file; rank 1 then fails."""
    save = TrainerState.save_to_json

    def kill(self: TrainerState, path: str) -> None:
        if rank == 0 and self.global_step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        save(self, path)

    TrainerState.save_to_json = kill
