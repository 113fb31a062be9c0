"""Train a small transformer in a plain loop, with the optimizer's state on SSD.

    python plain_loop.py --directory run --steps 200

Stop it in any way, Ctrl-C and `kill -9` included, and run it again: it goes on after the last
checkpoint, to the same bits as if it had never been stopped.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

import offload

VOCABULARY, LENGTH = 64, 32


class Transformer(torch.nn.Module):
    """Predicts the next of a sequence of numbers."""

    def __init__(self, width: int = 64, num_layers: int = 2) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, width)
        self.positions = torch.nn.Parameter(torch.zeros(LENGTH, width))
        layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, num_layers)
        self.head = torch.nn.Linear(width, VOCABULARY)
        mask = torch.nn.Transformer.generate_square_subsequent_mask(LENGTH)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(numbers) + self.positions
        mask: Any = self.mask
        return self.head(self.layers(hidden, mask=mask.to(hidden.dtype), is_causal=True))


def make_batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw arithmetic progressions; a real program would read its data at a position it saves."""
    start, stride = torch.randint(VOCABULARY, (2, size, 1))
    numbers = (start + stride * torch.arange(LENGTH + 1)) % VOCABULARY
    return numbers[:, :-1], numbers[:, 1:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--directory", type=Path, default=Path("run"), help="on a local SSD")
    parser.add_argument("--steps", type=int, default=200, help="in all, over all runs")
    parser.add_argument("--every", type=int, default=10, help="steps from checkpoint to checkpoint")
    parser.add_argument("--batch", type=int, default=16, help="sequences in a batch")
    parser.add_argument("--log", type=Path, help="directory for TensorBoard, if it is installed")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model = Transformer().to(torch.bfloat16)
    optimizer = offload.AdamW(
        model.parameters(), lr=1e-3, directory=arguments.directory, model=model, keep=2
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=arguments.steps)
    writer: Any = None
    before: offload.Stats | None = None
    if arguments.log is not None:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(arguments.log))

    start = 0
    checkpoint = optimizer.restore()  # parameters, optimizer state and hyper-parameters
    if checkpoint is not None:
        start = checkpoint.train_state["step"]  # checkpoint.step does not count skipped steps
        scheduler.load_state_dict(checkpoint.train_state["scheduler"])
        torch.set_rng_state(checkpoint.train_state["random"])
        print(f"continuing after step {start}", flush=True)

    for step in range(start, arguments.steps):
        numbers, following = make_batch(arguments.batch)
        logits = model(numbers)
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), following.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        print(f"step {step + 1} loss {loss.item()!r}", flush=True)
        if writer is not None:
            writer.add_scalar("loss", loss.item(), step)
            stats = optimizer.stats()
            for name, value in stats.scalars(since=before).items():
                writer.add_scalar(name, value, step)
            before = stats
        if (step + 1) % arguments.every == 0 or step + 1 == arguments.steps:
            optimizer.checkpoint(  # returns at once; durable soon after
                {
                    "step": step + 1,
                    "scheduler": scheduler.state_dict(),
                    "random": torch.get_rng_state(),
                },
                metrics={"loss": loss.item()},
            )
    if writer is not None:
        writer.close()
    optimizer.close()  # waits for the last checkpoint, and raises if it failed
    print(optimizer.stats().summary())


if __name__ == "__main__":
    main()
