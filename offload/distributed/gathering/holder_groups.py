"""Process groups of the ranks that hold the same boxes, used by this library alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    BroadcastOptions,
    PrefixStore,
    Store,
    _get_default_store,
)

from offload.distributed.gathering.sharing import ProcessGroup

MakeGroup: TypeAlias = Callable[[Store, int, int, timedelta], ProcessGroup]
"""Function that connects a group, given a store of its own, the rank, the number of ranks, and the
time limit."""


def gloo(store: Store, rank: int, num_ranks: int, limit: timedelta) -> ProcessGroup:
    """Connect a group of gloo, for values in host memory."""
    group: Any = dist.ProcessGroupGloo(store, rank, num_ranks, limit)  # its stubs lack methods
    return cast("ProcessGroup", group)


class HolderGroups:
    """A process group for each set of holders, and one of all ranks for exchanges between them.

    The groups are made here, so that broadcasts of this library never mix with those of the model,
    such as the reductions of gradients. The constructor is collective: all ranks of the training
    must call it, with the same sets.

    ``torch.distributed.new_group`` is not used. Either it must be called by all processes of the
    job, also by those that do not train the model; or, with ``use_local_synchronization=True``, it
    connects only ranks that have made equally many groups before, and others wait in vain.

    Args:
        holder_sets: Sets of ranks, each ascending; ranks are numbered within `group`.
        group: Group of the ranks that train the model; None for the default group.
        timeout_s: Seconds for which a rank waits for another one in each broadcast.
        make: Function that connects the groups that carry values. It must accept tensors of the
            device that the values are on. The group for exchanges is always of gloo.

    Raises:
        RuntimeError: A rank has ended, or has not called this within the time limit.
    """

    def __init__(
        self,
        holder_sets: Iterable[tuple[int, ...]],
        *,
        group: dist.ProcessGroup | None = None,
        timeout_s: float,
        make: MakeGroup = gloo,
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
            ranks: make(
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

        Args:
            values: Values to send, or memory to receive them; uint8, contiguous. It may not be
                changed or freed before the result's ``wait()`` has returned.
            ranks: Set of holders.
            owner: Rank that sends.

        Returns:
            The work, as ``torch.distributed`` returns it.

        Raises:
            KeyError: There is no group of these ranks.
            RuntimeError: A rank has ended. ``wait()`` may raise this, too; and also if another rank
                is later than the time limit allows.
        """
        options = BroadcastOptions()
        options.rootRank = ranks.index(owner)
        options.rootTensor = 0
        return self._groups[ranks].broadcast([values], options)


_num_made: Counter[str] = Counter()
"""Number of `HolderGroups` that this process has made, by the ranks of the training."""
