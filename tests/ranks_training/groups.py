"""One of four ranks, of which two and two train a model of their own.

python -m tests.ranks_training.groups DIRECTORY    # on every rank
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import offload
from offload import DriveTuning, Options
from tests.limits import AGREEMENT_S

PAIRS = [[0, 1], [2, 3]]


def main(directory: Path) -> dict[str, Any]:
    """Train a model in the group of this rank, and return what was sealed."""
    groups = [dist.new_group(pair) for pair in PAIRS]
    dist.barrier()  # both begin at the same time
    number = dist.get_rank() // 2
    weight = torch.nn.Parameter(torch.full((64,), float(number)))
    optimizer = offload.SGD(
        [weight],
        lr=1.0,
        directory=directory / str(number),
        process_group=groups[number],
        options=Options(
            allow_volatile=True,
            agreement_timeout_s=AGREEMENT_S,
            chunk_bytes=4096,
            drives=DriveTuning(calibrate=False),
        ),
    )
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    sealed = optimizer.checkpoint({"rank": dist.get_rank()}).result()
    found = {"states": sealed.train_states, "values": weight.unique().tolist()}
    optimizer.close()
    dist.barrier()  # rank 0 serves the key-value store of both groups
    return found


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(json.dumps(main(Path(sys.argv[1]))), flush=True)
    dist.destroy_process_group()
