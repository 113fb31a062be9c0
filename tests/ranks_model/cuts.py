"""Models that ranks divide, and the oracle of who owns which byte, computed by numpy."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import torch

from offload.format.boxes import Box
from offload.format.digests import DigestContext
from offload.format.header import DTYPE_BYTES, Header
from offload.format.shares.model_shares import ModelShares, TensorBox, divide

CONTEXT = DigestContext("0" * 32, 7)
ROWS = {
    "rows of 2 bytes": (torch.bfloat16, (10, 1)),
    "rows of 6 bytes": (torch.float16, (700, 3)),
    "rows of 4094 bytes": (torch.bfloat16, (8, 2047)),
    "rows of 4092 bytes": (torch.float32, (5, 1023)),
    "rows of 4096 bytes": (torch.float32, (7, 1024)),
    "fewer rows than ranks": (torch.float32, (2, 77)),
    "one row": (torch.float32, (1, 3)),
    "a vector": (torch.float32, (1001,)),
    "cube": (torch.float32, (5, 6, 70)),
    "large": (torch.bfloat16, (31, 3000)),
}
"""Tensors that ranks divide, with rows of 2 to 4,096 bytes and more."""

OTHERS = {
    "scalar": (torch.float32, ()),
    "empty": (torch.float32, (0, 3)),
    "mask": (torch.bool, (13,)),
    "count": (torch.int64, ()),
    "frozen": (torch.float32, (9000,)),
}
SHAPES = {name: shape for name, (_, shape) in ROWS.items()}
COLUMNS = {name: max(range(len(shape)), key=shape.__getitem__) for name, shape in SHAPES.items()}
"""The longest dimension of each tensor that ranks divide."""


def values(seed: int) -> dict[str, torch.Tensor]:
    """Return a model's values."""
    return {
        name: random_values(shape, dtype, 1000 * seed + number)
        for number, (name, (dtype, shape)) in enumerate({**ROWS, **OTHERS}.items())
    }


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def some_shares(
    header: Header,
    piece_bytes: int = 1 << 24,
    num_ranks: int = 3,
    writer: int = 0,
    dims: Mapping[str, int] | None = None,
) -> ModelShares:
    """Divide the model of `values` among ranks."""
    owned = divided(SHAPES, num_ranks, dims)
    return divide(header, owned, writer=writer, piece_bytes=piece_bytes)


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
    shapes: Mapping[str, tuple[int, ...]], num_ranks: int, dims: Mapping[str, int] | None = None
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


def owner_of_bytes(shares: ModelShares) -> np.ndarray:
    """Return the rank that owns each byte of a file; -1 for the header."""
    header = shares.header
    found = np.full(header.file_bytes, -1)
    for entry in header.entries.values():
        owners = np.full(entry.shape, -1)
        for rank, boxes in enumerate(shares.boxes):
            for one in boxes:
                if one.name == entry.name:
                    owners[one.box.slices] = rank
        start = header.data_start + entry.start
        found[start : start + entry.nbytes] = np.repeat(
            owners.reshape(-1), DTYPE_BYTES[entry.dtype]
        )
    return found


def random_values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return a tensor of random bytes."""
    generator = torch.Generator().manual_seed(seed)
    num = int(np.prod(shape)) if shape else 1
    data = torch.randint(0, 256, (num * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    if dtype == torch.bool:
        data %= 2
    return data.view(dtype).reshape(shape)
