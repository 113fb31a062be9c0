"""Train on several processes with FSDP2's `fully_shard`, with the optimizer's state on SSD.

    torchrun --standalone --nproc-per-node=2 fsdp2.py --directory run --steps 200

Each process (rank) holds a shard of each parameter, and steps and stores the state of its shards.
Stop all ranks in any way and run the command again, with as many ranks: they go on after the last
checkpoint. This script trains on the CPU.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import offload

WIDTH = 64


def make_model() -> torch.nn.Sequential:
    """Return a model that predicts the sum of its inputs, with the same values on all ranks."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, 1)
    )
    return model.to(torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--directory", type=Path, default=Path("run"), help="on a local SSD")
    parser.add_argument("--steps", type=int, default=200, help="in all, over all runs")
    parser.add_argument("--every", type=int, default=10, help="steps from checkpoint to checkpoint")
    parser.add_argument("--batch", type=int, default=16, help="samples of each rank in a step")
    arguments = parser.parse_args()

    dist.init_process_group("gloo")  # before the optimizer, which finds the ranks through it
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = make_model()
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = offload.AdamW(  # after fully_shard; on every rank, with the same directory
        model.parameters(), lr=1e-3, directory=arguments.directory, model=model, keep=2
    )
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)

    start = 0
    torch.manual_seed(1 + rank)  # each rank draws its own data
    checkpoint = optimizer.restore()  # on every rank
    if checkpoint is not None:
        start = checkpoint.train_state["step"]  # the value that this rank has passed
        scheduler.load_state_dict(checkpoint.train_state["scheduler"])
        torch.set_rng_state(checkpoint.train_state["random"])
        if rank == 0:
            print(f"continuing after step {start}", flush=True)

    for step in range(start, arguments.steps):
        x = torch.randn(arguments.batch, WIDTH, dtype=torch.bfloat16)
        loss = (model(x) - x.sum(1, keepdim=True)).float().square().mean()
        loss.backward()  # fully_shard averages the gradients; each rank has those of its shards
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()  # on every rank; nothing is sent between ranks
        scheduler.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step + 1} loss {loss.item()!r}", flush=True)
        if (step + 1) % arguments.every == 0 or step + 1 == arguments.steps:
            optimizer.checkpoint(  # on every rank, not on rank 0 alone
                {
                    "step": step + 1,
                    "scheduler": scheduler.state_dict(),
                    "random": torch.get_rng_state(),  # differs between the ranks
                }
            )
    optimizer.close()  # waits for the last checkpoint, and raises if it failed
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
