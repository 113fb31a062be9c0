"""Train on several processes with Hugging Face accelerate, with the optimizer's state on SSD.

    torchrun --standalone --nproc-per-node=2 accelerate_ddp.py --directory run --steps 200

`accelerate launch --multi_gpu --num_processes 2` starts it as well. Stop all processes in any way
and run the command again, with as many processes: they go on after the newest folder. This script
trains on the CPU, where `accelerate launch` starts one process only, unless it is told otherwise.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

import offload
from offload.integrations.accelerate import follow

WIDTH = 64


def make_model() -> torch.nn.Module:
    """Return a model that predicts the sum of its inputs."""
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, 1)
    )


def newest_folder(directory: Path) -> Path | None:
    """Return the newest folder that was finished; None before the first one."""
    folders = sorted(directory.glob("step-*"))
    finished = [folder for folder in folders if (folder / "finished").exists()]
    return finished[-1] if finished else None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--directory", type=Path, default=Path("run"), help="on a local SSD")
    parser.add_argument("--steps", type=int, default=200, help="in all, over all runs")
    parser.add_argument("--every", type=int, default=10, help="steps from folder to folder")
    parser.add_argument("--batch", type=int, default=16, help="samples of each process in a step")
    arguments = parser.parse_args()

    accelerator = Accelerator(cpu=True)
    set_seed(0)
    model = make_model()
    optimizer = offload.AdamW(  # in every process, with the same directory
        model.parameters(), lr=1e-3, directory=arguments.directory / "store", model=model
    )
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)
    model, prepared, scheduler = accelerator.prepare(model, optimizer, scheduler)
    follow(accelerator, prepared)

    start = 0
    set_seed(1, device_specific=True)  # each process draws its own data
    newest = newest_folder(arguments.directory)
    if newest is not None:
        accelerator.load_state(str(newest))
        start = int(newest.name.removeprefix("step-"))
        accelerator.print(f"continuing after step {start}", flush=True)

    for step in range(start, arguments.steps):
        x = torch.randn(arguments.batch, WIDTH)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        prepared.step()
        scheduler.step()
        prepared.zero_grad()
        accelerator.print(f"step {step + 1} loss {loss.item()!r}", flush=True)
        if (step + 1) % arguments.every == 0 or step + 1 == arguments.steps:
            folder = arguments.directory / f"step-{step + 1:08}"
            accelerator.save_state(str(folder))  # in every process
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                (folder / "finished").touch()
    optimizer.close()
    accelerator.end_training()


if __name__ == "__main__":
    main()
