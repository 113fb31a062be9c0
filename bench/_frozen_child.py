"""Process that trains a small part of a model and seals often; see `bench.frozen`.

python -m bench._frozen_child STORE FROZEN_BYTES TRAINED_BYTES SEALS DTYPE DEVICE

`bench.frozen` and tests start it. It resumes if the store has a checkpoint. It prints one JSON
document. For each seal this has the bytes that the process has read and written, by the kernel's
count, the bytes that the block device DEVICE (a name in /sys/block; empty for none) was given to
write in that time, and the seconds of the seal.
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
_SECTOR_BYTES = 512  # unit of the counts in /sys/block, whatever the device's own sector size
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Adapted(torch.nn.Module):
    """A frozen square matrix in bf16, and two slim matrices beside it that are trained."""

    def __init__(self, width: int, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = torch.nn.Linear(width, width, bias=False, dtype=torch.bfloat16)
        self.base.requires_grad_(False)
        self.down = torch.nn.Linear(width, rank, bias=False, dtype=dtype)
        self.up = torch.nn.Linear(rank, width, bias=False, dtype=dtype)
        with torch.no_grad():
            self.base.weight.normal_(0, 0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input plus its product with the slim matrices.

        The frozen matrix is left out, since its product would take too long on a CPU.
        """
        added: torch.Tensor = self.up(self.down(x.to(self.down.weight.dtype)))
        return x + added.to(x.dtype)


def make_model(frozen_bytes: int, trained_bytes: int, dtype: torch.dtype) -> torch.nn.Module:
    """Return layers with about the given numbers of frozen and trained bytes."""
    torch.manual_seed(0)
    width = math.isqrt(frozen_bytes // _LAYERS // 2)
    rank = max(trained_bytes // _LAYERS // (2 * width * dtype.itemsize), 1)
    return torch.nn.Sequential(*(Adapted(width, rank, dtype) for _ in range(_LAYERS)))


def device_bytes(device: str) -> int:
    """Return the bytes that a block device was given to write so far; 0 without a device."""
    if not device:
        return 0
    return int(Path(f"/sys/block/{device}/stat").read_text().split()[6]) * _SECTOR_BYTES


def train(
    store: str, frozen_bytes: int, trained_bytes: int, seals: int, dtype: str, device: str
) -> dict[str, Any]:
    """Resume if the store has a checkpoint, take a step before each seal, and measure the seals."""
    model = make_model(frozen_bytes, trained_bytes, DTYPES[dtype])
    trained = [p for p in model.parameters() if p.requires_grad]
    width = model[0].base.in_features  # type: ignore[index]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning about disk space for frozen parameters
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
    """Train with the settings on the command line, and print the result."""
    store, frozen_bytes, trained_bytes, seals, dtype, device = sys.argv[1:]
    found = train(store, int(frozen_bytes), int(trained_bytes), int(seals), dtype, device)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
