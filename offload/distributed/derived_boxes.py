"""Boxes of all ranks that each rank can compute by itself, so that they need not be exchanged.

Torch cuts a dimension as `torch.chunk` does, mesh dimension by mesh dimension, if the placement is
Shard. Every rank knows the mesh and the placements of a DTensor, and so the boxes of all ranks.
Whether they are the true ones is seen by each rank for its own box only. So the ranks must compare
what they have computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch

from offload.format.boxes import Box, Cut
from offload.model.shards import is_dtensor

View: TypeAlias = list[tuple[str, Cut]]
"""Name and box of each tensor of which a rank holds something, in the order of the model."""


def derived_views(tensors: Mapping[str, torch.Tensor], ranks: Sequence[int]) -> list[View] | None:
    """Return what each rank holds, by rank; None if torch has no rule for one of the tensors."""
    views: list[View] = [[] for _ in ranks]
    known: dict[object, list[Cut | None] | None] = {}
    for name, tensor in tensors.items():
        with torch._C.DisableTorchFunctionSubclass():
            shape = tuple(tensor.shape)
        cuts: list[Cut | None] | None = [Cut(shape, Box.whole(shape))] * len(ranks)
        if is_dtensor(tensor):
            mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
            pattern = shape, placements, id(mesh)  # the layers of a model are divided alike
            if pattern not in known:
                known[pattern] = _cuts(shape, mesh.mesh, placements, ranks)
            cuts = known[pattern]
        if cuts is None:
            return None
        for view, cut in zip(views, cuts, strict=True):
            if cut is not None:
                view.append((name, cut))
    return views


def _cuts(
    shape: tuple[int, ...],
    mesh: torch.Tensor,
    placements: Sequence[object],
    ranks: Sequence[int],
) -> list[Cut | None] | None:
    """Return the box of each rank, None for one that is not in the mesh; None without a rule."""
    from torch.distributed.tensor import Replicate, Shard

    if any(type(placement) not in (Replicate, Shard) for placement in placements):
        return None  # strided shards, for example
    places = {int(mesh[tuple(at)]): at for at in torch.ones_like(mesh).nonzero().tolist()}
    found: list[Cut | None] = []
    for rank in ranks:
        at = places.get(rank)
        if at is None:
            found.append(None)
            continue
        offsets, sizes = [0] * len(shape), [*shape]
        for number, placement in enumerate(placements):
            if isinstance(placement, Shard):
                dim = placement.dim
                step = -(-sizes[dim] // mesh.shape[number])
                first = min(at[number] * step, sizes[dim])
                sizes[dim] = min(step, sizes[dim] - first)
                # Torch says of an empty part that it begins where the tensor ends.
                offsets[dim] = offsets[dim] + first if sizes[dim] else shape[dim]
        found.append(Cut(shape, Box(tuple(offsets), tuple(sizes))))
    return found
