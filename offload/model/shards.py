"""Shards: the part of a tensor that this rank steps and stores, as a view of live memory.

A parameter of the model and the memory that is stepped are two things. The parameter gives the
name, the group and the identity. A `Shard` gives the memory and its gradient:

- `whole`: the memory is the parameter itself.
- `rows`: the memory is some rows of a parameter that every rank holds, as in DDP.
- `local`: the memory is the local part of a DTensor, as in FSDP2 and tensor parallelism.
- `at_home`: the memory is elsewhere, and the parameter is filled from it only while it is used.

Views are taken anew at each use, because torch may replace the memory of a parameter: FSDP2 does so
at the first forward. ``torch.distributed.tensor`` is only imported if a DTensor is met.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from offload.errors import UnsupportedParameterError
from offload.format.boxes import Box, Cut
from offload.model.homes import home_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """The part of a tensor that this rank steps and stores."""

    parameter: torch.Tensor
    """Tensor of the model; a parameter, or a buffer."""

    cut: Cut | None
    """Box of the tensor, if the shard is not the whole tensor."""

    part_of: Callable[[torch.Tensor], torch.Tensor]
    """Function that returns the shard's part of the tensor, or of its gradient, as a view."""

    def tensor(self) -> torch.Tensor:
        """Return the live memory, without a graph.

        The use of the parameter is not announced to a watch (see `offload.model.watch`), because a
        step may be running.
        """
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            return self.part_of(self.parameter)

    def gradient(self) -> torch.Tensor | None:
        """Return the part of the parameter's gradient; None if there is no gradient.

        Raises:
            UnsupportedParameterError: The gradient is not sharded as the parameter is.
        """
        gradient = self.parameter.grad
        if gradient is None:
            return None
        with torch.no_grad():
            return self.part_of(gradient)

    @property
    def is_empty(self) -> bool:
        """Whether the tensor has elements, but none of them is in the shard."""
        cut = self.cut
        return cut is not None and not cut.box.num_elements and 0 not in cut.shape


Shards: TypeAlias = Callable[[str, torch.Tensor], Shard | None]
"""Function that returns this rank's shard of a tensor of the model, given the tensor's name.

It returns None for a tensor that other ranks step and store. It is called for every parameter and
buffer, also for frozen ones, and may be called again at any time."""


def whole(parameter: torch.Tensor) -> Shard:
    """Return the shard that is the whole tensor."""
    return Shard(parameter, None, _itself)


def at_home(parameter: torch.Tensor, home: torch.Tensor) -> Shard:
    """Return the shard that is the whole of a parameter whose values are in its home.

    Args:
        parameter: Parameter of the model.
        home: Memory of the parameter's shape; see `offload.model.homes`.
    """

    def part_of(tensor: torch.Tensor) -> torch.Tensor:
        """Return the present home of the parameter, or its gradient."""
        present = home_of(parameter) if tensor is parameter else tensor
        return home if present is None else present

    return Shard(parameter, None, part_of)


def rows(parameter: torch.Tensor, start: int, stop: int) -> Shard:
    """Return the shard of some rows, that is of a range of dimension 0.

    Args:
        parameter: Tensor of at least one dimension.
        start: First row.
        stop: One past the last row.

    Raises:
        ValueError: The tensor has no such rows.
    """
    shape = tuple(parameter.shape)
    if not shape or not 0 <= start <= stop <= shape[0]:
        raise ValueError(f"a tensor of shape {list(shape)} has no rows from {start} to {stop}")
    if (start, stop) == (0, shape[0]):
        return whole(parameter)
    box = Box((start, *(0 for _ in shape[1:])), (stop - start, *shape[1:]))
    return Shard(parameter, Cut(shape, box), lambda tensor: tensor.detach()[start:stop])


def local(tensor: DTensor, name: str) -> Shard | None:
    """Return the shard that is the local part of a DTensor.

    Args:
        tensor: Parameter or buffer.
        name: Name of the tensor, for messages.

    Returns:
        The shard, which may be empty; None if this rank is not in the tensor's mesh.

    Raises:
        UnsupportedParameterError: The local part is not one box of the tensor: it is a summand of
            the values (a Partial placement), or consists of several boxes, or is not what the
            placements say.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor import Shard as Sharded
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    from torch.distributed.tensor.placement_types import _StridedShard

    with torch._C.DisableTorchFunctionSubclass():
        mesh, placements, shape = tensor.device_mesh, tensor.placements, tuple(tensor.shape)
    for placement in placements:
        if not isinstance(placement, Replicate | Sharded | _StridedShard):
            raise UnsupportedParameterError(
                f"{name!r} is a DTensor with the placement {placement}: a rank's part of it is not "
                "a box of the tensor's elements. Redistribute it to Shard and Replicate placements "
                "before constructing the optimizer"
            )
    if mesh.get_coordinate() is None:
        return None
    sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    box = Box(tuple(map(int, offsets)), tuple(map(int, sizes)))
    for dim in {p.dim for p in placements if isinstance(p, _StridedShard)}:
        if not _is_range(tensor, dim, box):
            raise UnsupportedParameterError(
                f"{name!r} is a DTensor with the placements {list(placements)}: this rank's part "
                f"of it is several boxes, expected one. Shard dimension {dim} by FSDP2 and tensor "
                "parallelism only, with the mesh dimension of tensor parallelism last"
            )
    is_whole = box.sizes == shape
    shard = Shard(tensor, None if is_whole else Cut(shape, box), _local_part_of(tensor, name))
    found = tuple(shard.tensor().shape)
    if found != box.sizes:
        raise UnsupportedParameterError(
            f"{name!r} is a DTensor of shape {list(shape)} with the placements {list(placements)}, "
            f"so this rank's part of it has the shape {list(box.sizes)}, but it is {list(found)}. "
            "Make the DTensor with distribute_tensor() or fully_shard(), which shard as the "
            "placements say"
        )
    return shard


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a DTensor."""
    # Importing this module takes long. If it has not been imported, no DTensor exists.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def own_shards(
    own: Mapping[str, Cut], has_owner: Container[str] = (), *, keeps_others: bool = True
) -> Shards:
    """Return the function that gives a rank the boxes that it owns; see `format.shares.dealing`.

    Args:
        own: Box of each tensor that this rank owns, by name.
        has_owner: Names of all tensors whose boxes have owners on any rank.
        keeps_others: Whether this rank also stores plain tensors that are not in `has_owner`, such
            as buffers. One rank does.

    The function raises UnsupportedParameterError for a tensor that this rank cannot step the box
    of, because the box is neither rows of a plain tensor nor the local part of a DTensor.
    """

    def shard_of(name: str, tensor: torch.Tensor) -> Shard | None:
        """Return the piece of a tensor that this rank updates, None if it updates nothing of it."""
        cut = own.get(name)
        if cut is None and (name in has_owner or not (keeps_others or is_dtensor(tensor))):
            return None
        if is_dtensor(tensor):
            shard = local(tensor, name)  # type: ignore[arg-type]
        elif cut is None or cut.box.sizes == cut.shape or not cut.shape:
            shard = whole(tensor)
        else:
            shard = rows(tensor, cut.box.offsets[0], cut.box.stops[0])
        if cut is None:
            return shard
        found = cut_of(shard) if shard is not None else None
        if found != cut:
            raise UnsupportedParameterError(
                f"{name!r}: this rank was dealt the box {cut.box.notation()} of the shape "
                f"{list(cut.shape)}, and can step "
                f"{f'{found.box.notation()} of {list(found.shape)}' if found else 'nothing'}. "
                "Change neither shapes nor sharding after the optimizer was constructed"
            )
        return shard

    return shard_of


def cut_of(shard: Shard) -> Cut:
    """Return the box of a shard and the shape of its tensor, also if the shard is the whole."""
    if shard.cut is not None:
        return shard.cut
    with torch._C.DisableTorchFunctionSubclass():
        shape = tuple(shard.parameter.shape)
    return Cut(shape, Box.whole(shape))


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _local_part_of(owner: DTensor, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function that returns the local part of a DTensor and of its gradient."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor import DTensor

    def part_of(tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the parameter or of its gradient."""
        if tensor is not owner:
            placements = getattr(tensor, "placements", None)
            if not isinstance(tensor, DTensor) or placements != owner.placements:
                raise UnsupportedParameterError(
                    f"the gradient of {name!r} is a {type(tensor).__name__} with the placements "
                    f"{placements}, expected a DTensor with those of the parameter, "
                    f"{owner.placements}. Redistribute it before step(): p.grad = "
                    "p.grad.redistribute(placements=p.placements)"
                )
        part = tensor.to_local()
        if isinstance(part, AsyncCollectiveTensor):
            part = part.wait()
        found: torch.Tensor = part.detach()
        return found

    return part_of


def _is_range(tensor: DTensor, dim: int, box: Box) -> bool:
    """Return whether this rank's indices in a dimension are neighbours, those of the box."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate() or ()
    indices = torch.arange(tensor.shape[dim], dtype=torch.int64, device="cpu")
    for number, placement in enumerate(tensor.placements):
        if getattr(placement, "dim", None) == dim:
            split: Any = placement
            parts, _ = split._split_tensor(
                indices, mesh.size(number), with_padding=False, contiguous=True
            )
            indices = parts[coordinate[number]]
    start, stop = box.offsets[dim], box.stops[dim]
    expected = torch.arange(start, stop, dtype=torch.int64, device="cpu")
    return bool(torch.equal(indices, expected)) or not (len(indices) or len(expected))
