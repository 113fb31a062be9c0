"""Train a small network under Lightning, with the optimizer's state on SSD.

    python lightning_loop.py --directory run --epochs 20
    torchrun --standalone --nproc-per-node=2 lightning_loop.py --devices 2    # two processes

Stop it in any way, Ctrl-C and `kill -9` included, and run it again: it goes on after the newest
`.ckpt`, to the same losses as if it had never been stopped.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

import offload
from offload.integrations.lightning import OffloadCallback

WIDTH = 32


class Network(pl.LightningModule):
    """An ordinary module; only `configure_optimizers` knows where the state is.

    Args:
        store: Directory of the optimizer, on a local SSD.
        fresh: Whether to start over, should there be checkpoints in it.
        steps: For the schedule of the learning rate.
    """

    def __init__(self, store: Path, *, fresh: bool, steps: int) -> None:
        super().__init__()
        self.store, self.fresh, self.steps = store, fresh, steps
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 128),
            torch.nn.GELU(),
            torch.nn.Dropout(0.1),
            torch.nn.Linear(128, 1),
        )

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = (self.layers(x).float() - y.float()).square().mean()
        self.log("train_loss", loss)
        print(f"step {self.global_step + 1} loss {loss.item()!r}", flush=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = offload.AdamW(
            self.parameters(), lr=1e-2, directory=self.store, model=self, fresh=self.fresh
        )
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def make_data(num_batches: int) -> torch.utils.data.DataLoader[Any]:
    """Make batches of a function that is to be learned."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(16 * num_batches, WIDTH, generator=random)
    dataset = torch.utils.data.TensorDataset(x, x.sin().sum(1, keepdim=True))
    return torch.utils.data.DataLoader(dataset, batch_size=16, shuffle=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--directory", type=Path, default=Path("run"), help="on a local SSD")
    parser.add_argument("--epochs", type=int, default=20, help="in all, over all runs")
    parser.add_argument("--steps", type=int, default=10, help="in an epoch, which ends in a .ckpt")
    parser.add_argument("--precision", default="bf16-true", help="as Lightning's Trainer takes it")
    parser.add_argument("--devices", type=int, default=1, help="processes")
    arguments = parser.parse_args()

    files = arguments.directory / "files"
    saved = sorted(files.glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    newest = saved[-1] if saved else None
    pl.seed_everything(0)
    num_steps = arguments.epochs * arguments.steps
    model = Network(arguments.directory / "store", fresh=newest is None, steps=num_steps)
    trainer = pl.Trainer(
        max_epochs=arguments.epochs,  # not max_steps: see docs/lightning.md
        precision=arguments.precision,
        gradient_clip_val=1.0,
        accelerator="cpu",
        devices=arguments.devices,
        strategy="auto" if arguments.devices == 1 else "ddp",
        callbacks=[ModelCheckpoint(dirpath=files), OffloadCallback()],
        logger=CSVLogger(arguments.directory, name="logs"),
        log_every_n_steps=1,
        enable_progress_bar=False,
        default_root_dir=arguments.directory,
    )
    trainer.fit(model, make_data(arguments.steps), ckpt_path=newest)
    trainer.optimizers[0].close()


if __name__ == "__main__":
    main()
