"""Prints the memory that a fresh process takes for a model with streamed, frozen blocks, as JSON.

python -m tests.blocks.peak DIRECTORY LAYERS
"""

from __future__ import annotations

import json
import sys

import torch

import offload
from tests.blocks.models import Model, batch
from tests.process_memory import reset_peak, resident_bytes

WIDTH = 320


def main(directory: str, layers: int) -> None:
    torch.set_num_threads(1)
    batch(0)
    model = Model(layers, WIDTH)
    for layer in model.layers:
        layer.requires_grad_(requires_grad=False)
    parameters = sum(p.nbytes for p in model.parameters())
    before = resident_bytes("VmRSS")
    reset_peak()
    optimizer = offload.AdamW(
        [p for p in model.parameters() if p.requires_grad],
        directory=directory,
        model=model,
        options=offload.Options(parameters="host", chunk_bytes=1 << 20),
    )
    for step in range(3):
        model.loss(batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    above = resident_bytes("VmHWM") - before
    buffers = optimizer.stats().block_buffers
    print(json.dumps({"parameters": parameters, "above": above, "buffers": buffers}))
    optimizer.checkpoint().result()
    optimizer.close()


main(sys.argv[1], int(sys.argv[2]))
