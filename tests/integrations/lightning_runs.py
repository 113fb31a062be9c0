"""A small model under Lightning's own Trainer, and what was logged while it trained."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

import offload
from offload.integrations.lightning import OffloadCallback

BATCHES = 4
"""In an epoch."""

OPTIONS = offload.Options(chunk_bytes=4096, ring_chunks=3)

MakeOptimizer = Callable[[pl.LightningModule], torch.optim.Optimizer]


class Stop(BaseException):
    """Ends a fit as a failure of the machine would: nothing is saved because of it."""


class StopAfter(pl.Callback):
    """Stops after that many batches, when everybody has seen the batch."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def on_train_batch_start(self, trainer: pl.Trainer, *_: object) -> None:
        if trainer.global_step >= self.batches:
            raise Stop


class Model(pl.LightningModule):
    """Dropout needs the random state, the scheduler its position."""

    def __init__(self, make: MakeOptimizer) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(16, 64), torch.nn.BatchNorm1d(64), torch.nn.GELU(),
            torch.nn.Dropout(0.2), torch.nn.Linear(64, 1),
        )  # fmt: skip
        self._make = make

    def loss(self, batch: Sequence[torch.Tensor]) -> torch.Tensor:
        x, y = batch
        return (self.layers(x).float() - y.float()).square().mean()

    def training_step(self, batch: Sequence[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Sequence[torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = self._make(self)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=16)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def on_ssd(directory: Path, **options: Any) -> MakeOptimizer:
    """Return what makes the optimizer under test."""

    def make(module: pl.LightningModule) -> torch.optim.Optimizer:
        settings = {"lr": 1e-2, "model": module, "options": OPTIONS, **options}
        return offload.AdamW(module.parameters(), directory=directory, **settings)

    return make


def in_memory(module: pl.LightningModule) -> torch.optim.Optimizer:
    """Make torch's own."""
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


def data(*, shuffle: bool = True) -> torch.utils.data.DataLoader[Any]:
    random = torch.Generator().manual_seed(3)
    x = torch.randn(BATCHES * 8, 16, generator=random)
    dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    return torch.utils.data.DataLoader(dataset, batch_size=8, shuffle=shuffle)


def saving(directory: Path, **settings: Any) -> ModelCheckpoint:
    """Return a `ModelCheckpoint` that keeps the two best epochs, and the last."""
    chosen = {"monitor": "val_loss", "save_top_k": 2, "save_last": True, **settings}
    return ModelCheckpoint(dirpath=directory, filename="{epoch}-{step}", **chosen)


def trainer_for(directory: Path, *, max_epochs: int = 3, **settings: Any) -> pl.Trainer:
    quiet = {
        "accelerator": "cpu",
        "devices": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 1,
    }
    settings.setdefault("logger", CSVLogger(directory, name="", flush_logs_every_n_steps=1))
    return pl.Trainer(max_epochs=max_epochs, default_root_dir=directory, **{**quiet, **settings})


def fit(
    directory: Path,
    make: MakeOptimizer,
    *,
    ckpt_path: str | Path | None = None,
    stop_after: int | None = None,
    seed: int = 1,
    model_class: type[Model] = Model,
    callback: OffloadCallback | None = None,
    checkpoints: ModelCheckpoint | None = None,
    save: bool = True,
    train: Any = None,
    extra: Sequence[pl.Callback] = (),
    **settings: Any,
) -> Model:
    """Train, until the end or until the machine fails; the model keeps a reference to its trainer.

    Losses are in `logged`, files in ``directory / "files"``.
    """
    pl.seed_everything(seed, verbose=False)
    model = model_class(make)
    callbacks: list[pl.Callback] = [checkpoints or saving(directory / "files")] if save else []
    if make is not in_memory:
        callbacks.append(callback or OffloadCallback(log_stats=False))
    callbacks += extra
    if stop_after is not None:
        callbacks.append(StopAfter(stop_after))
    trainer = trainer_for(directory, callbacks=callbacks, enable_checkpointing=save, **settings)
    loaders = (data() if train is None else train, data(shuffle=False))
    try:
        trainer.fit(model, *loaders, ckpt_path=None if ckpt_path is None else str(ckpt_path))
    except Stop:
        assert stop_after is not None
    else:
        assert stop_after is None, "it was to be stopped, and has ended"
    return model


def logged(directory: Path, column: str = "train_loss") -> dict[int, str]:
    """Return what `CSVLogger` has written, by step; what was run twice must be the same."""
    found: dict[int, str] = {}
    for path in sorted(directory.glob("version_*/metrics.csv")):
        with path.open() as file:
            for row in csv.DictReader(file):
                if row.get(column):
                    found.setdefault(int(row["step"]), row[column])
                    assert found[int(row["step"])] == row[column], f"step {row['step']}, twice"
    return found


def parameters(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the whole state dict, to be compared."""
    return [(name, tensor) for name, tensor in model.state_dict().items()]
