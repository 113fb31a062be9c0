"""Process groups of the ranks that hold the same boxes, used by this library alone."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    AllreduceOptions,
    BroadcastOptions,
    PrefixStore,
    Store,
    _get_default_store,
)

_LOOK_S = 1.0
"""Seconds for which a rank waits for the others before it looks whether they will ever come."""


def share_numbers(
    numbers: Sequence[int], group: dist.ProcessGroup, look: Callable[[], None] | None = None
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


def share_bytes(data: bytes, group: dist.ProcessGroup) -> list[bytes]:
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


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return ranks in words: ``rank 2``, ``ranks 0, 2, 3``."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _wait(work: Any, group: dist.ProcessGroup, look: Callable[[], None]) -> None:
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


def _abandon(work: Any, group: dist.ProcessGroup) -> None:
    """Leave work alone that may never end.

    A thread of gloo waits for it; torch 2.13 cannot stop that. Work and group are never freed: what
    frees them would wait for the thread, and if the thread frees the work while Python ends, the
    process is aborted.
    """
    for kept in (work, group):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def gloo(store: Store, rank: int, num_ranks: int, limit: timedelta) -> dist.ProcessGroup:
    """Connect a group of gloo, for values in host memory."""
    group: Any = dist.ProcessGroupGloo(store, rank, num_ranks, limit)  # its stubs lack methods
    return cast("dist.ProcessGroup", group)


class HolderGroups:
    """A process group for each set of holders, and one of all ranks for exchanges between them.

    The groups are made here, so that broadcasts of this library never mix with those of the model,
    such as the reductions of gradients. The constructor is collective: all ranks of the training
    must call it, with the same sets.

    ``torch.distributed.new_group`` is not used. Either it must be called by all processes of the
    job, also by those that do not train the model; or, with ``use_local_synchronization=True``, it
    connects only ranks that have made equally many groups before, and others wait in vain.
    """

    def __init__(
        self,
        holder_sets: Iterable[tuple[int, ...]],
        *,
        group: dist.ProcessGroup | None = None,
        timeout_s: float,
    ) -> None:
        self.rank = dist.get_rank(group)
        """Number of this rank in the training."""
        self.num_ranks = dist.get_world_size(group)
        limit = timedelta(seconds=timeout_s)
        training = ",".join(map(str, dist.get_process_group_ranks(group or dist.group.WORLD)))
        # All ranks of the training call this equally often, so they count alike.
        _num_made[training] += 1
        prefix = f"offload/gather/{training}/{_num_made[training]}"
        store = PrefixStore(prefix, _get_default_store())
        self.everyone = gloo(PrefixStore("all", store), self.rank, self.num_ranks, limit)
        """Group of all ranks for exchanges; its tensors are in host memory."""
        # Each rank makes its groups in the same order, so no two ranks wait for each other.
        self._groups = {
            ranks: gloo(
                PrefixStore(",".join(map(str, ranks)), store),
                ranks.index(self.rank),
                len(ranks),
                limit,
            )
            for ranks in sorted({*holder_sets})
            if self.rank in ranks
        }

    def broadcast(self, values: torch.Tensor, ranks: tuple[int, ...], owner: int) -> Any:
        """Begin to send an owner's values to the other ranks of a set that this rank belongs to.

        The values, contiguous and uint8, stay as they are until the result's ``wait()`` returned.
        """
        options = BroadcastOptions()
        options.rootRank = ranks.index(owner)
        options.rootTensor = 0
        return self._groups[ranks].broadcast([values], options)


_num_made: Counter[str] = Counter()
"""Number of `HolderGroups` that this process has made, by the ranks of the training."""
