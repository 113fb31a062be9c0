"""Trains a model of many blocks in a fresh process, with all of it on the drive or in memory.

python -m tests.blocks.beyond plain|drive DIRECTORY STEPS LAYERS [FROZEN]

FROZEN is a pattern of the names of parameters that are not trained.

Each moment is announced on a line, so that a test can end the process there. The last line has the
digest of all parameters, and the memory that was needed, in bytes, as JSON.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import sys
from typing import Any

import torch

import offload
from tests.blocks.models import HYPER, Model, batch, recomputing
from tests.numerics.reference import Reference
from tests.process_memory import reset_peak, resident_bytes

WIDTH = 384
M_MMAP_THRESHOLD = -3


def moment(name: str, step: int) -> None:
    print(f"moment {name} {step}", flush=True)


def freeze(model: torch.nn.Module, pattern: str) -> None:
    for name, p in model.named_parameters():
        p.requires_grad_(requires_grad=not re.search(pattern, name))


def main(kind: str, directory: str, steps: str, layers: str, frozen: str = "$^") -> None:
    # glibc keeps freed tensors of up to 32 MiB, unless a threshold is set. Those of real models are
    # larger.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 64 << 10)
    torch.set_num_threads(1)
    small = Model(1, 32).to(torch.bfloat16)  # torch loads much of itself at its first use
    small.loss(batch(0)).backward()
    torch.optim.AdamW(small.parameters()).step()
    start = resident_bytes("VmRSS")
    reset_peak()
    torch.manual_seed(0)
    optimizer: Any
    if kind == "plain":
        model = Model(int(layers), WIDTH).to(torch.bfloat16)
        freeze(model, frozen)
        optimizer = Reference(torch.optim.AdamW, model.parameters(), **HYPER)
        begin = 0
    else:
        prepare(directory, int(layers))
        with offload.outside_memory():
            model = Model(int(layers), WIDTH).to(torch.bfloat16)
        freeze(model, frozen)
        options = offload.Options(
            parameters="drive",
            gradients="drive",
            chunk_bytes=1 << 20,
            ring_chunks=3,
            drives=offload.DriveTuning(calibrate=False),  # measuring takes memory, once
        )
        optimizer = offload.AdamW(
            model.parameters(),
            directory=f"{directory}/run",
            model=model,
            keep=1,
            options=options,
            **HYPER,
        )
        begin = optimizer.restore().step
    model.recompute = recomputing(reentrant=False)  # else activations grow with the depth
    parameters = sum(p.numel() * 2 for p in model.parameters())
    for step in range(begin, int(steps)):
        for p in model.parameters():
            p.grad = None
        for micro in range(2):
            loss = model.loss(batch(10 * step + micro))
            moment("forward", step)
            loss.backward()
            moment("backward", step)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        moment("step", step)
        if kind == "drive":
            handle = optimizer.checkpoint()
            moment("seal", step)
            handle.result()
    above = resident_bytes("VmHWM") - start
    digest = hashlib.sha256()
    for p in model.parameters():
        digest.update(p.detach().clone().view(torch.int16).numpy().tobytes())
    print(json.dumps({"digest": digest.hexdigest(), "above": above, "parameters": parameters}))
    if kind == "drive":
        optimizer.close()


def prepare(directory: str, layers: int) -> None:
    """Fill a store with the weights that `plain` begins with, in a process of its own."""
    if os.path.exists(f"{directory}/run"):
        return
    os.makedirs(directory)
    if os.fork() == 0:
        import safetensors.torch

        torch.manual_seed(0)
        model = Model(layers, WIDTH).to(torch.bfloat16)
        safetensors.torch.save_file(model.state_dict(), f"{directory}/model.safetensors")
        offload.import_checkpoint(
            f"{directory}/model.safetensors", f"{directory}/run", torch.optim.AdamW
        )
        os._exit(0)
    _, status = os.wait()
    if status:
        raise SystemExit("the store could not be filled")


if __name__ == "__main__":
    main(*sys.argv[1:])
