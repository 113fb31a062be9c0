"""Live boxes: what a rank holds of the model's tensors, as plain memory.

A rank holds whole tensors (DDP, buffers) or local shards (FSDP2, tensor parallelism). The memory of
a local shard may be replaced, for example by a lazy initialisation. So live boxes are made anew for
each use.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from offload.errors import MismatchError
from offload.format.boxes import Box
from offload.format.shares.model_shares import ModelShare


@dataclass(frozen=True, slots=True, eq=False)
class LiveBox:
    """A box of a tensor of the model file, with its live memory on this rank."""

    name: str
    """Name of the tensor in the model file."""

    box: Box

    tensor: torch.Tensor
    """Live memory of the box; its shape is that of the box."""

    by_value: bool = False
    """Whether a checkpoint copies the box at once, because a forward or a step may change it."""

    @classmethod
    def whole(cls, name: str, tensor: torch.Tensor, *, by_value: bool = False) -> LiveBox:
        """Return the box of a tensor that is whole on this rank."""
        return cls(name, Box.whole(tensor.shape), tensor, by_value)

    def captured(self) -> LiveBox:
        """Return this object, or one with a copy of the memory if it is copied by value."""
        return replace(self, tensor=self.tensor.detach().clone()) if self.by_value else self


def views_of(share: ModelShare, held: Iterable[LiveBox]) -> list[torch.Tensor]:
    """Return, for each entry of a share, the view of its box in the memory that a rank holds."""
    by_name: dict[str, list[LiveBox]] = {}
    for live in held:
        by_name.setdefault(live.name, []).append(live)
    views = []
    for entry in share.entries:
        holders = by_name.get(entry.name, [])
        fitting = [one for one in holders if one.box.intersection(entry.box) == entry.box]
        if not fitting:
            raise MismatchError(
                f"this rank has to write {entry.box.notation()} of {entry.name!r}, but holds "
                f"{', '.join(one.box.notation() for one in holders) or 'nothing of it'}: the "
                "parameter has been divided anew since the store was laid out"
            )
        offsets = zip(entry.box.offsets, fitting[0].box.offsets, strict=True)
        within = Box(tuple(a - b for a, b in offsets), entry.box.sizes)
        views.append(fitting[0].tensor.detach()[within.slices])
    return views
