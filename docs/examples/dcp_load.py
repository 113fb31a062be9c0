"""Load a checkpoint into plain PyTorch on any number of processes, without an export.

    torchrun --standalone --nproc-per-node=3 dcp_load.py --directory run --steps 10

The checkpoint may be that of one process, of ddp.py or of fsdp2.py, on any number of ranks. Here it
is loaded into FSDP2 with FP32 parameters and torch's own AdamW. The FP32 parameters are the masters
of the 16-bit ones, so training goes on exactly. This script trains on the CPU.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from offload.integrations.dcp import CheckpointReader

WIDTH = 64


def make_model() -> torch.nn.Sequential:
    """Return the model of fsdp2.py, with FP32 parameters."""
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, 1)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--directory", type=Path, default=Path("run"), help="a store of offload")
    parser.add_argument("--steps", type=int, default=10, help="steps to take after loading")
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = make_model()
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optim": optimizer_state, "step": 0}
    dcp.load(state, storage_reader=CheckpointReader(arguments.directory))  # on every rank
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optim"],
    )
    if dist.get_rank() == 0:
        print(f"loaded step {state['step']}", flush=True)

    torch.manual_seed(1)
    for step in range(state["step"], state["step"] + arguments.steps):
        x = torch.randn(16, WIDTH)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step + 1} loss {loss.item()!r}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
