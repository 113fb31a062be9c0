"""Train on processes that torchrun restarts by itself, on as many ranks as there are.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --standalone --nproc-per-node=2 --max-restarts=100 elastic.py --directory run

If a process (rank) is killed, torchrun ends the others and starts all of them again; they go on
after the last checkpoint. The same happens if a node is lost, with those that are left, if they see
the files (--nnodes=1:2 instead of --standalone). So nothing in this script may depend on the number
of ranks: each step has one batch, of which every rank takes its share, and the batch of a step
depends on nothing but its number. This script trains on the CPU.

The variable gives gloo a new key-value store after each restart. In the old one, ranks may find the
addresses of processes that have ended, and then cannot connect.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import offload

WIDTH = 64


def make_model() -> torch.nn.Module:
    """Return a model that predicts the sum of its inputs, with the same values on all ranks."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, 1)
    )
    return model.to(torch.bfloat16)


def share(step: int, batch: int, rank: int, num_ranks: int) -> torch.Tensor:
    """Return a rank's samples of a step; together, all ranks have the same on any number of them.

    With a data loader, this is the place to skip to the batch of the step.
    """
    generator = torch.Generator().manual_seed(step)
    return torch.randn(batch, WIDTH, generator=generator).bfloat16()[rank::num_ranks]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--directory", type=Path, default=Path("run"), help="on a local SSD")
    parser.add_argument("--steps", type=int, default=200, help="in all, over all restarts")
    parser.add_argument("--every", type=int, default=10, help="steps from checkpoint to checkpoint")
    parser.add_argument(
        "--lost-after", type=float, default=60, help="seconds without a sign of a rank"
    )
    parser.add_argument("--batch", type=int, default=24, help="samples of all ranks in a step")
    arguments = parser.parse_args()

    dist.init_process_group("gloo")  # before the optimizer, which finds the ranks through it
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        print(f"starting {num_ranks} ranks after {restarts} restarts", flush=True)
    model = DistributedDataParallel(make_model())
    optimizer = offload.AdamW(  # on every rank, with the same directory
        model.parameters(),
        lr=1e-3,
        directory=arguments.directory,
        model=model.module,  # the wrapped module, which one rank alone can give as well
        keep=2,
        # If a node is lost, its torchrun ends no rank: the others end after so many seconds.
        options=offload.Options(agreement_timeout_s=arguments.lost_after),
    )
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)

    start = 0
    checkpoint = optimizer.restore()  # on every rank; any number of ranks may have written it
    if checkpoint is not None:
        start = checkpoint.train_state["step"]
        scheduler.load_state_dict(checkpoint.train_state["scheduler"])
        if rank == 0:
            print(f"continuing after step {start}", flush=True)

    for step in range(start, arguments.steps):
        x = share(step, arguments.batch, rank, num_ranks)
        errors = (model(x) - x.sum(1, keepdim=True)).float()
        # DistributedDataParallel divides the sum of the gradients by the number of ranks.
        loss = errors.square().sum() * num_ranks / arguments.batch
        loss.backward()
        optimizer.step()  # on every rank
        scheduler.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step + 1} loss of rank 0 {loss.item()!r}", flush=True)
        if (step + 1) % arguments.every == 0 or step + 1 == arguments.steps:
            # The same on all ranks, because another number of ranks may read it.
            optimizer.checkpoint({"step": step + 1, "scheduler": scheduler.state_dict()})
    optimizer.close()  # waits for the last checkpoint, and raises if it failed
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
