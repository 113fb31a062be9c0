"""Lightning's Trainer on two processes; see `tests.integrations.rank_jobs`."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

import offload
from offload.integrations.lightning import OffloadCallback
from tests.integrations import lightning_runs
from tests.integrations.rank_jobs import OPTIONS, whole_sum


class Network(lightning_runs.Model):
    """The model of `lightning_runs` without running statistics, which differ between ranks.

    Args:
        make: Function that makes the optimizer.
        kind: ``ddp``, ``shards`` or ``whole``.
    """

    def __init__(self, make: lightning_runs.MakeOptimizer, kind: str) -> None:
        super().__init__(make)
        self.kind = kind
        self.losses: dict[int, float] = {}
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Dropout(0.2), torch.nn.Linear(64, 1)
        )

    def configure_model(self) -> None:
        if self.kind == "ddp" or hasattr(self.layers, "unshard"):
            return
        mesh = self.device_mesh["data_parallel"]
        for layer in self.layers:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(self.layers, mesh=mesh)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses[self.global_step + 1] = loss.item()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)


class KillWithinSave(pl.Callback):
    """Kills the processes when the state has been sealed, and the file has not been written."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        optimizer: Any = trainer.optimizers[0]

        def kill(*_: object) -> None:
            if optimizer.num_steps == self.step and optimizer.position.sealed:
                os.kill(os.getpid(), signal.SIGKILL)

        optimizer.register_state_dict_post_hook(kill)


def run(
    root: Path,
    *,
    kind: str = "ddp",
    in_memory: bool = False,
    resume: int | None = None,
    stop_after: int = 0,
    kill_at: int = 0,
    discard_newer: bool = False,
    settings: dict[str, Any] | None = None,
    separate: bool = False,
) -> dict[str, Any]:
    """Train three epochs of four steps, and return the losses by step.

    Args:
        root: Directory of the files and of the store.
        kind: ``ddp``; or how files have the model of FSDP2: in ``shards``, or as a ``whole``.
        in_memory: Whether to train with torch's own AdamW.
        resume: Step of the file to continue from.
        stop_after: Steps after which the training fails.
        kill_at: Step within whose save the processes are killed.
        discard_newer: As for `OffloadCallback`.
        settings: Further arguments of the Trainer.
        separate: Whether the optimizer is told that each process trains a model of its own.
    """
    strategy: Any = DDPStrategy(process_group_backend="gloo")
    if kind != "ddp":
        strategy = ModelParallelStrategy(
            data_parallel_size=2,
            tensor_parallel_size=1,
            save_distributed_checkpoint=kind == "shards",
        )
    extra: dict[str, Any] = {"process_group": offload.SEPARATE} if separate else {}
    store = root / (f"run-{os.environ['RANK']}" if separate else "run")
    make = lightning_runs.on_ssd(store, options=offload.Options(**OPTIONS), **extra)
    pl.seed_everything(1, verbose=False)
    torch.manual_seed(5)
    model = Network(lightning_runs.in_memory if in_memory else make, kind)
    torch.manual_seed(60 + int(os.environ["RANK"]))  # dropout differs between the ranks
    callbacks: list[pl.Callback] = [lightning_runs.saving(root / "files")]
    if not in_memory:
        callbacks.append(OffloadCallback(log_stats=False, discard_newer=discard_newer))
    if stop_after:
        callbacks.append(lightning_runs.StopAfter(stop_after))
    if kill_at:
        callbacks.append(KillWithinSave(kill_at))
    trainer = lightning_runs.trainer_for(
        root, strategy=strategy, devices=2, logger=False, callbacks=callbacks, **(settings or {})
    )
    data = lightning_runs.data().dataset
    loaders = (
        torch.utils.data.DataLoader(data, batch_size=4, shuffle=True),
        torch.utils.data.DataLoader(data, batch_size=8),
    )
    path = next((root / "files").glob(f"*step={resume}.ckpt")) if resume else None
    try:
        trainer.fit(model, *loaders, ckpt_path=path and str(path))
    except lightning_runs.Stop:
        return {"losses": model.losses, "parameters": []}
    parameters = [whole_sum(p) for p in model.parameters()]
    if not in_memory:
        trainer.optimizers[0].close()
    return {"losses": model.losses, "parameters": parameters}
