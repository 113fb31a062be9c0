"""Exchange of a few bytes between all ranks of a group.

Both functions use all-reduce of a table in which each rank fills its own row, because that works
alike in all supported versions of torch. The group must accept tensors in host memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.distributed.distributed_c10d import AllreduceOptions, BroadcastOptions


class RankGroup(Protocol):
    """What this wing uses of a process group, or of one of its backends."""

    def rank(self) -> int:
        """Return the number of this rank in the group."""
        ...

    def size(self) -> int:
        """Return the number of ranks."""
        ...

    def allreduce(self, tensors: list[torch.Tensor], options: AllreduceOptions, /) -> Any:
        """Begin to add up a tensor of all ranks; the result has a ``wait()``."""
        ...

    def broadcast(self, tensors: list[torch.Tensor], options: BroadcastOptions, /) -> Any:
        """Begin to send a tensor of one rank to all; the result has a ``wait()``."""
        ...


def share_numbers(numbers: Sequence[int], group: RankGroup) -> list[tuple[int, ...]]:
    """Return the numbers of every rank, by rank. All ranks must give equally many.

    Args:
        numbers: Numbers of this rank, each of at most 63 bits and not negative.
        group: Group of the ranks.

    Raises:
        RuntimeError: A rank has ended, or has not called this within the group's time limit.
    """
    table = torch.zeros((group.size(), len(numbers)), dtype=torch.int64, device="cpu")
    table[group.rank()] = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    group.allreduce([table], AllreduceOptions()).wait()
    return [tuple(row) for row in table.tolist()]


def share_bytes(data: bytes, group: RankGroup) -> list[bytes]:
    """Return the data of every rank, by rank. If no rank has any, one exchange of numbers is made.

    Raises the errors of `share_numbers`.
    """
    lengths = [length for (length,) in share_numbers([len(data)], group)]
    most = max(lengths)
    if not most:
        return [b""] * len(lengths)
    table = torch.zeros((group.size(), most), dtype=torch.uint8, device="cpu")
    if data:
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        table[group.rank(), : len(data)] = own
    group.allreduce([table], AllreduceOptions()).wait()
    return [row[:length].numpy().tobytes() for row, length in zip(table, lengths, strict=True)]
