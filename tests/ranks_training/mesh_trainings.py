"""Trainings on meshes: replicated shards (HSDP), tensor parallelism, and both together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.ranks_training.fsdp2_trainings import Mixed
from tests.ranks_training.trainings import Training


class Block(torch.nn.Module):
    """A block of a transformer without attention: norm, up, down."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, inner)
        self.down = torch.nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output."""
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Blocks(torch.nn.Module):
    """Blocks between two layers, with a buffer."""

    def __init__(self, width: int = 12, inner: int = 20) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(width, inner) for _ in range(2)])
        self.head = torch.nn.Linear(width, 6, bias=False)
        self.register_buffer("table", torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output."""
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Meshed(Training):
    """A training on a mesh."""

    clip: float | None = 0.5
    width, inner = 12, 20

    def build(self) -> torch.nn.Module:
        return Blocks(self.width, self.inner).to(self.dtype)

    def data(self, step: int, number: int = 0) -> torch.Tensor:
        seed = 1000 * step + 100 * number + self.data_rank
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(4, self.width, generator=generator)

    def clip_gradients(self, parameters: Sequence[torch.Tensor]) -> None:
        """Clip by the norm over all meshes: torch's function takes gradients of one mesh only."""
        assert self.clip is not None
        by_mesh: dict[Any, list[torch.Tensor]] = {}
        for parameter in parameters:
            by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
        norms = []
        for held in by_mesh.values():
            norm = torch.nn.utils.get_total_norm([p.grad for p in held if p.grad is not None])
            norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        total = torch.linalg.vector_norm(torch.stack(norms))
        for held in by_mesh.values():
            torch.nn.utils.clip_grads_with_norm_(held, self.clip, total)

    @property
    def data_rank(self) -> int:
        """Ranks with the same number have the same data."""
        return self.rank


class Hsdp(Meshed):
    """Shards of two ranks each, replicated twice."""

    dtype = torch.float32

    def wrap(self, model: Any) -> torch.nn.Module:
        mesh = init_device_mesh("cpu", (2, self.size // 2), mesh_dim_names=("replica", "shard"))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=Mixed.policy)
        return fully_shard(model, mesh=mesh, mp_policy=Mixed.policy)


class Tensor(Meshed):
    """Tensor parallelism alone: columns, rows, and a vocabulary."""

    data_rank = 0  # type: ignore[assignment]

    def wrap(self, model: Any) -> torch.nn.Module:
        mesh = init_device_mesh("cpu", (self.size,), mesh_dim_names=("tensor",))
        return self.parallel(model, mesh)

    def parallel(self, model: Any, mesh: Any) -> Any:
        """Divide the layers of a model."""
        for block in model.blocks:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        plan = {"head": ColwiseParallel(output_layouts=Replicate())}
        return parallelize_module(model, mesh, plan)


class Both(Tensor):
    """Tensor and sequence parallelism, and FSDP2 of what each rank has of it, in uneven sizes.

    Norms are DTensors on both dimensions.
    """

    inner, width = 10, 9

    def wrap(self, model: Any) -> torch.nn.Module:
        mesh = init_device_mesh("cpu", (2, self.size // 2), mesh_dim_names=("data", "tensor"))
        self.data_rank = mesh["data"].get_local_rank()  # type: ignore[assignment]
        self.parallel(model, mesh["tensor"])
        for block in model.blocks:
            fully_shard(block, mesh=mesh["data"])
        return fully_shard(model, mesh=mesh["data"])

    def data(self, step: int, number: int = 0) -> torch.Tensor:
        whole = super().data(step, number).reshape(2, 2, self.width)
        rank = torch.distributed.get_rank() % 2
        return whole[:, rank : rank + 1]

    def parallel(self, model: Any, mesh: Any) -> Any:
        for block in model.blocks:
            plan = {
                "norm": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1)),
            }
            parallelize_module(block, mesh, plan)
        plan = {"head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())}
        return parallelize_module(model, mesh, plan)
