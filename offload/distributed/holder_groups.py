"""Process groups of the ranks that hold the same boxes, used by this library alone."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

import torch.distributed as dist


class HolderGroups:
    """A process group for each set of holders, and one of all ranks for exchanges between them.

    The groups are made here, so that broadcasts of this library never mix with those of the model,
    such as the reductions of gradients. The constructor is collective: all ranks of the training
    must call it, with the same sets.

    Args:
        holder_sets: Sets of ranks, each ascending; ranks are numbered within `group`.
        group: Group of the ranks that train the model; None for the default group.
        timeout_s: Seconds for which a rank waits for another one in each broadcast.
        backend: Backend of the groups that carry values. It must accept tensors of the device that
            the values are on. The group for exchanges is always of gloo.

    Raises:
        RuntimeError: A rank has ended, or has not called this within the time limit.
    """

    def __init__(
        self,
        holder_sets: Iterable[tuple[int, ...]],
        *,
        group: dist.ProcessGroup | None = None,
        timeout_s: float,
        backend: str = "gloo",
    ) -> None:
        self.rank = dist.get_rank(group)
        """Number of this rank in the training."""
        self.num_ranks = dist.get_world_size(group)
        self._global = dist.get_process_group_ranks(group or dist.group.WORLD)
        limit = timedelta(seconds=timeout_s)
        self.everyone = self._new(tuple(range(self.num_ranks)), limit, "gloo")
        """Group of all ranks for exchanges; its tensors are in host memory."""
        # Each rank makes its groups in the same order, so no two ranks wait for each other.
        self._groups = {
            ranks: self._new(ranks, limit, backend)
            for ranks in sorted({*holder_sets})
            if self.rank in ranks
        }

    def of(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """Return the group of a set of holders that this rank belongs to.

        Raises:
            KeyError: There is no such group.
        """
        return self._groups[ranks]

    def _new(self, ranks: tuple[int, ...], limit: timedelta, backend: str) -> dist.ProcessGroup:
        group: dist.ProcessGroup = dist.new_group(
            [self._global[rank] for rank in ranks],
            timeout=limit,
            backend=backend,
            use_local_synchronization=True,
            group_desc="offload",
        )
        return group
