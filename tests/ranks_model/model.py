"""A model with rows of 2 to 4,096 bytes, which ranks divide, and its values."""

from __future__ import annotations

import torch

from offload.format.digests import DigestContext
from offload.format.header import Header
from offload.format.shares.model_shares import ModelShares, divide
from tests.ranks_model.cuts import divided, random_values

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
    "large": (torch.bfloat16, (31, 3000)),
}
OTHERS = {
    "scalar": (torch.float32, ()),
    "empty": (torch.float32, (0, 3)),
    "mask": (torch.bool, (13,)),
    "count": (torch.int64, ()),
    "frozen": (torch.float32, (9000,)),
}


def values(seed: int) -> dict[str, torch.Tensor]:
    every = {**ROWS, **OTHERS}
    return {
        name: random_values(shape, dtype, 1000 * seed + number)
        for number, (name, (dtype, shape)) in enumerate(every.items())
    }


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).numpy())


def some_shares(
    header: Header, piece_bytes: int, num_ranks: int = 3, writer: int = 0
) -> ModelShares:
    owned = divided({name: shape for name, (_, shape) in ROWS.items()}, num_ranks)
    return divide(header, owned, writer=writer, piece_bytes=piece_bytes)
