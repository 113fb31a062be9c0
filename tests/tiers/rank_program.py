"""One rank of a training with a tier: ``rank_program.py DIRECTORY CASE``; CASE is a JSON object."""

from __future__ import annotations

import dataclasses
import json
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import offload
from offload.options import Tier


def main(directory: str, case: dict[str, Any]) -> dict[str, Any]:
    """Restore, train, seal, and close; return what the test looks at."""
    torch.manual_seed(7)
    layers = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Linear(96, 24)).bfloat16()
    model = DistributedDataParallel(layers)
    optimizer = offload.AdamW(
        model.parameters(),
        directory=directory,
        model=model,
        keep=case.get("keep", 2),
        options=offload.Options(
            allow_volatile=True,
            agreement_timeout_s=5.0,
            chunk_bytes=4096,
            drives=offload.DriveTuning(calibrate=False),
            tier=Tier(case["tier"], finish_s=case.get("finish_s", 60.0)),
        ),
        lr=1e-2,
    )
    with warnings.catch_warnings(record=True) as caught:
        restored = optimizer.restore()
    for step in range(optimizer.num_steps + 1, case["last"] + 1):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        x = torch.randn(4, 64, generator=generator).bfloat16()
        model(x).float().square().mean().backward()
        optimizer.step()
        if step in case["seals"]:
            optimizer.checkpoint({"step": step}).result()
    optimizer.close()
    stats = optimizer.stats().tier
    return {
        "resumed": restored.step if restored else 0,
        "warned": [str(one.message) for one in caught if "offload pull" in str(one.message)],
        "tier": dataclasses.asdict(stats) if stats is not None else None,
    }


if __name__ == "__main__":
    dist.init_process_group("gloo")
    found = main(sys.argv[1], json.loads(sys.argv[2]))
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()
