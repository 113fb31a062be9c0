"""Exchange of a few bytes between all ranks of a group.

Both functions use all-reduce of a table in which each rank fills its own row, because that works
alike in all supported versions of torch. The group must accept tensors in host memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed.distributed_c10d import AllreduceOptions, BroadcastOptions


class ProcessGroup(Protocol):
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


_LOOK_S = 1.0
"""Seconds for which a rank waits for the others before it looks whether they will ever come."""


def share_numbers(
    numbers: Sequence[int], group: ProcessGroup, look: Callable[[], None] | None = None
) -> list[tuple[int, ...]]:
    """Return the numbers of every rank, by rank. All ranks must give equally many."""
    table = torch.zeros((group.size(), len(numbers)), dtype=torch.int64, device="cpu")
    table[group.rank()] = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    work = group.allreduce([table], AllreduceOptions())
    if look is None:
        work.wait()
    else:
        _wait(work, group, look)
    return [tuple(row) for row in table.tolist()]


def share_bytes(data: bytes, group: ProcessGroup) -> list[bytes]:
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


def _wait(work: Any, group: ProcessGroup, look: Callable[[], None]) -> None:
    """Wait for work of a process group, and look after the other ranks meanwhile."""
    while True:
        try:
            work.wait(timedelta(seconds=_LOOK_S))
        except RuntimeError:
            failure: RuntimeError | None = None
            if work.is_completed():
                try:
                    work.wait()
                except RuntimeError as error:
                    failure = error
                else:
                    return  # what has left after it took part is no loss
            try:
                look()  # also if the work has failed: a rank that ends may have said why
            except BaseException:
                _abandon(work, group)
                raise
            if failure is not None:
                raise failure from None
        else:
            return


def _abandon(work: Any, group: ProcessGroup) -> None:
    """Leave work alone that may never end.

    A thread of gloo waits for it; torch 2.13 cannot stop that. Work and group are never freed: what
    frees them would wait for the thread, and if the thread frees the work while Python ends, the
    process is aborted.
    """
    for kept in (work, group):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
