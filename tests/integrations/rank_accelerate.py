"""A loop of accelerate's documentation on two processes; see `tests.integrations.rank_jobs`."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import ProjectConfiguration

import offload
from offload.integrations.accelerate import follow
from tests.integrations import fsdp_on_cpu
from tests.integrations.rank_jobs import OPTIONS, whole_sum


def run(
    root: Path,
    *,
    kind: str = "ddp",
    stop_after: int = 6,
    resume: int | None = None,
    in_memory: bool = False,
    discard_newer: bool = False,
    follows: bool = True,
    separate: bool = False,
    kill_at: int = 0,
) -> dict[str, Any]:
    """Train, and return losses and sums of parameters.

    Args:
        root: Directory of the folders and of the store.
        kind: ``ddp``; or the type of FSDP2's state dicts.
        stop_after: Number of steps.
        resume: Step whose folder is loaded first.
        in_memory: Whether to train with torch's own AdamW.
        discard_newer: As for `follow`.
        follows: Whether to call `follow`.
        separate: Whether the optimizer is told that each process trains a model of its own.
        kill_at: Step within whose save the processes are killed, when the state has been sealed.
    """
    plugin = None
    if kind != "ddp":
        fsdp_on_cpu.allow()
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
    config = ProjectConfiguration(str(root / "out"), automatic_checkpoint_naming=True)
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2, project_config=config, fsdp_plugin=plugin
    )
    torch.manual_seed(3)
    model: Any = torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1)
    )
    optimizer: Any
    if in_memory:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    else:
        directory = root / (f"run-{accelerator.process_index}" if separate else "run")
        group = offload.SEPARATE if separate else None
        optimizer = offload.AdamW(
            model.parameters(), lr=0.02, directory=directory, model=model, keep=1,
            options=offload.Options(**OPTIONS), process_group=group,
        )  # fmt: skip
    scheduler: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
    own = optimizer
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    if not in_memory and follows:
        follow(accelerator, optimizer, discard_newer=discard_newer)
    if resume:
        number = resume // 2 - 1
        accelerator.load_state(str(root / f"out/checkpoints/checkpoint_{number}"))
        names = (root / "out/checkpoints").iterdir()
        config.iteration = 1 + max(int(name.name.rpartition("_")[2]) for name in names)
    else:
        torch.manual_seed(50 + accelerator.process_index)  # dropout differs between the ranks
    if kill_at:
        _kill_within_save(accelerator, own, kill_at)
    losses: dict[int, list[float]] = {}
    for step in range(resume or 0, stop_after):
        for part in range(2):
            seed = 100 * step + 10 * part + accelerator.process_index
            x = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))
            with accelerator.accumulate(model):
                loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.setdefault(step + 1, []).append(loss.item())
        if (step + 1) % 2 == 0 and not in_memory:
            accelerator.save_state()
    parameters = [whole_sum(p) for p in model.parameters()]
    if not in_memory:
        own.close()
    accelerator.wait_for_everyone()  # rank 0 serves the key-value store, and must not end first
    accelerator.end_training()
    return {"losses": losses, "parameters": parameters}


def _kill_within_save(accelerator: Accelerator, optimizer: Any, step: int) -> None:
    def kill(*_: object) -> None:
        if optimizer.num_steps == step:
            os.kill(os.getpid(), signal.SIGKILL)

    accelerator.register_save_state_pre_hook(kill)  # called after that of `follow`
