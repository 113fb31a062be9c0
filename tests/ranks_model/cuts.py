"""Models that ranks divide, and the oracle of who owns which byte, computed by numpy."""

from __future__ import annotations

import random

import numpy as np
import torch

from offload.format.boxes import Box
from offload.format.header import DTYPE_BYTES, Header
from offload.format.shares.model_shares import TensorBox


def rows(shape: tuple[int, ...], num_ranks: int, dim: int = 0) -> list[Box]:
    """Divide as FSDP2 does: equal shards of the first ranks, the last ones shorter or empty."""
    step = -(-shape[dim] // num_ranks)
    boxes = []
    for rank in range(num_ranks):
        start, stop = min(rank * step, shape[dim]), min((rank + 1) * step, shape[dim])
        offsets, sizes = [0] * len(shape), list(shape)
        offsets[dim], sizes[dim] = start, stop - start
        boxes.append(Box(tuple(offsets), tuple(sizes)))
    return boxes


def divided(
    shapes: dict[str, tuple[int, ...]], num_ranks: int, dims: dict[str, int] | None = None
) -> list[list[TensorBox]]:
    """Return the boxes of each rank; in the given dimension, or else the first."""
    owned: list[list[TensorBox]] = [[] for _ in range(num_ranks)]
    for name, shape in shapes.items():
        for rank, box in enumerate(rows(shape, num_ranks, (dims or {}).get(name, 0))):
            owned[rank].append(TensorBox(name, box))
    return owned


def random_tiling(shape: tuple[int, ...], random_: random.Random, depth: int = 4) -> list[Box]:
    """Cut a tensor into boxes by random cuts in random dimensions."""

    def cut(box: Box, depth: int) -> list[Box]:
        wide = [d for d, size in enumerate(box.sizes) if size > 1]
        if not depth or not wide or random_.random() < 0.2:
            return [box]
        dim = random_.choice(wide)
        at = random_.randrange(1, box.sizes[dim])
        offsets, low, high = list(box.offsets), list(box.sizes), list(box.sizes)
        offsets[dim] += at
        low[dim], high[dim] = at, box.sizes[dim] - at
        parts = [Box(box.offsets, tuple(low)), Box(tuple(offsets), tuple(high))]
        return [found for part in parts for found in cut(part, depth - 1)]

    return cut(Box.whole(shape), depth)


def owner_of_bytes(header: Header, owned: list[list[TensorBox]], writer: int = 0) -> np.ndarray:
    """Return the rank that owns each byte of a file; -1 for the header."""
    found = np.full(header.file_bytes, -1)
    for entry in header.entries.values():
        values = np.full(entry.shape, writer)
        for rank, boxes in enumerate(owned):
            for one in boxes:
                if one.name == entry.name:
                    values[one.box.slices] = rank
        start = header.data_start + entry.start
        found[start : start + entry.nbytes] = np.repeat(
            values.reshape(-1), DTYPE_BYTES[entry.dtype]
        )
    return found


def random_values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return a tensor of random bytes, none of which makes a NaN that compares unequal."""
    generator = torch.Generator().manual_seed(seed)
    num = int(np.prod(shape)) if shape else 1
    data = torch.randint(0, 256, (num * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    if dtype == torch.bool:
        data %= 2
    return data.view(dtype).reshape(shape)
