"""Live boxes: what a rank holds of the model's tensors, as plain memory.

A rank holds whole tensors (DDP, buffers) or local shards (FSDP2, tensor parallelism). The memory of
a local shard may be replaced, for example by a lazy initialisation. So live boxes are made anew for
each use.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from offload.format.boxes import Box


@dataclass(frozen=True, slots=True, eq=False)
class LiveBox:
    """A box of a tensor of the model file, with its live memory on this rank."""

    name: str
    """Name of the tensor in the model file."""

    box: Box

    tensor: torch.Tensor
    """Live memory of the box; its shape is that of the box."""

    @classmethod
    def whole(cls, name: str, tensor: torch.Tensor) -> LiveBox:
        """Return the box of a tensor that is whole on this rank."""
        return cls(name, Box.whole(tensor.shape), tensor)
