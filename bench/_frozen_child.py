"""A process that trains little of a model and seals often; started by `bench.frozen`, and by tests.

python -m bench._frozen_child STORE FROZEN_BYTES TRAINED_BYTES SEALS DTYPE DEVICE

It resumes if the store has a checkpoint. Prints one JSON document: for each seal what the kernel
says that this process has read and written for it, what the block device DEVICE (a name in
/sys/block; empty for none) has taken meanwhile, and the seconds that it took.
"""

from __future__ import annotations

import json
import math
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

import offload
from bench._machine import io_bytes

_LAYERS = 8
_SECTOR_BYTES = 512  # of the counts in /sys/block, whatever the device's own is
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Adapted(torch.nn.Module):
    """A frozen square matrix in bf16, with two slim ones beside it that are trained."""

    def __init__(self, width: int, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = torch.nn.Linear(width, width, bias=False, dtype=torch.bfloat16)
        self.base.requires_grad_(False)
        self.down = torch.nn.Linear(width, rank, bias=False, dtype=dtype)
        self.up = torch.nn.Linear(rank, width, bias=False, dtype=dtype)
        with torch.no_grad():
            self.base.weight.normal_(0, 0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add what the slim matrices make of the input; the base is too slow on a CPU to count."""
        added: torch.Tensor = self.up(self.down(x.to(self.down.weight.dtype)))
        return x + added.to(x.dtype)


def make_model(frozen_bytes: int, trained_bytes: int, dtype: torch.dtype) -> torch.nn.Module:
    """Return layers that hold about so many bytes."""
    torch.manual_seed(0)
    width = math.isqrt(frozen_bytes // _LAYERS // 2)
    rank = max(trained_bytes // _LAYERS // (2 * width * dtype.itemsize), 1)
    return torch.nn.Sequential(*(Adapted(width, rank, dtype) for _ in range(_LAYERS)))


def device_bytes(device: str) -> int:
    """Return the bytes that a block device has been given to write so far; 0 without one."""
    if not device:
        return 0
    return int(Path(f"/sys/block/{device}/stat").read_text().split()[6]) * _SECTOR_BYTES


def train(
    store: str, frozen_bytes: int, trained_bytes: int, seals: int, dtype: str, device: str
) -> dict[str, Any]:
    """Resume if there is anything, take a step before each seal, and measure the seals."""
    model = make_model(frozen_bytes, trained_bytes, DTYPES[dtype])
    trained = [p for p in model.parameters() if p.requires_grad]
    width = model[0].base.in_features  # type: ignore[index]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the disk space is meant
        optimizer = offload.AdamW(trained, lr=1e-3, directory=store, model=model, keep=2)
        found = optimizer.restore()
        start = found.step if found else 0
        measured = []
        for step in range(start + 1, start + seals + 1):
            model(torch.full((1, width), 0.01 * step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.synchronize()
            before, before_device = io_bytes(), device_bytes(device)
            started = time.perf_counter()
            optimizer.checkpoint({"step": step}).result()
            seconds = time.perf_counter() - started
            read, written = (now - was for now, was in zip(io_bytes(), before, strict=True))
            measured.append(
                {
                    "seal_s": seconds,
                    "read_bytes": read,
                    "written_bytes": written,
                    "device_bytes": device_bytes(device) - before_device,
                }
            )
    optimizer.close()
    return {
        "resumed_from": start,
        "trained_bytes": sum(p.nbytes for p in trained),
        "frozen_bytes": sum(p.nbytes for p in model.parameters() if not p.requires_grad),
        "seals": measured,
    }


def main() -> None:
    """Train as the command line says."""
    store, frozen_bytes, trained_bytes, seals, dtype, device = sys.argv[1:]
    found = train(store, int(frozen_bytes), int(trained_bytes), int(seals), dtype, device)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
