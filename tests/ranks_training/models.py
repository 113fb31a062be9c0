"""Models of ranks, laid out in every way, with gradients that are given, and masters in memory."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from tests.limits import AGREEMENT_S

Groups = Sequence[Mapping[str, Any]]


@dataclass
class Setting:
    """What all calls of a rank have in common."""

    kind: str = "ddp"
    """``ddp``, ``fsdp2``, ``mixed`` for FP32 shards with a mixed-precision policy, ``hybrid`` for
    shards that are replicated once, ``tp`` for layers that are divided in either dimension,
    ``grid`` for such layers that are sharded as well, or ``one`` for a model that is not
    wrapped."""

    dtype: str = "bfloat16"
    widths: Sequence[int] = (5, 7, 3)
    frozen_elements: int = 5
    find_unused: bool = False
    hyper: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-2})
    options: dict[str, Any] = field(default_factory=dict)
    timeout_s: float = AGREEMENT_S
    given: bool = False
    """Whether gradients are given, so that they do not depend on the number of ranks."""
    group_timeout_s: float = 1800.0
    """Seconds for which torch itself waits for a rank; torchrun would end the others at once."""

    is_plain: bool = False
    """Whether steps are taken in memory; nothing is stored."""

    store_port: int = 0
    """Port of a key-value store that outlives the ranks, as torchrun has one; 0 for one of rank
    0."""


class Model(torch.nn.Module):
    """Layers of a few odd sizes, a frozen parameter, and a buffer that counts forwards."""

    def __init__(self, widths: Sequence[int], frozen_elements: int = 5) -> None:
        super().__init__()
        pairs = pairwise(widths)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(a, b) for a, b in pairs])
        self.maybe = torch.nn.Linear(widths[-1], widths[-1], bias=False)
        self.frozen = torch.nn.Parameter(torch.randn(frozen_elements), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output."""
        self.seen += 1
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return self.maybe(x)


def make_model(setting: Setting, size: int, seed: int = 7) -> Any:
    """Return a model with the random values of a seed, laid out over all ranks."""
    torch.manual_seed(seed)
    model = Model(setting.widths, setting.frozen_elements).to(getattr(torch, setting.dtype))
    if setting.kind == "one":
        return model
    if setting.kind == "ddp":
        return DistributedDataParallel(model, find_unused_parameters=setting.find_unused)
    if setting.kind in ("tp", "grid"):
        shape = (size,) if setting.kind == "tp" else (size // 2, 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[-len(shape) :])
        styles = (ColwiseParallel(), RowwiseParallel())
        for number, layer in enumerate(model.layers):
            parallelize_module(layer, mesh["tp"], styles[number % 2])
        if setting.kind == "grid":
            for layer in (*model.layers, model):
                fully_shard(layer, mesh=mesh["dp"])
        return model
    policy = MixedPrecisionPolicy()
    if setting.kind == "mixed":
        model.float()
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
        )
    if setting.kind == "hybrid":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("hosts", "ranks"))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def inner(model: Any) -> Any:
    """Return the model without DistributedDataParallel around it."""
    return getattr(model, "module", model)


def plain_name(name: str) -> str:
    """Return the name of a parameter without the prefix of a wrapper."""
    return name.removeprefix("module.")


def set_gradients(model: torch.nn.Module, step: int, skip: str = "") -> None:
    """Give each trained parameter its gradient of a step, which no number of ranks changes.

    So what one process stores is the oracle for what several ranks have stored.
    """
    for full_name, parameter in model.named_parameters():
        name = plain_name(full_name)
        if not parameter.requires_grad or (skip and skip in name):
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
        whole = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            parameter.grad = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        else:
            parameter.grad = whole


class Masters:
    """A torch optimizer of FP32 masters of this rank's memory of each parameter."""

    def __init__(self, name: str, groups: Groups, hyper: Mapping[str, Any]) -> None:
        self._masters: dict[torch.Tensor, torch.Tensor] = {}
        self.inner = getattr(torch.optim, name)([self._on_masters(g) for g in groups], **hyper)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups of the optimizer."""
        return self.inner.param_groups  # type: ignore[no-any-return]

    def add_param_group(self, group: Mapping[str, Any]) -> None:
        """Add parameters."""
        self.inner.add_param_group(self._on_masters(group))

    def _on_masters(self, group: Mapping[str, Any]) -> dict[str, Any]:
        own = {p: local(p).detach().clone().float() for p in group["params"]}
        self._masters |= own
        return {**group, "params": [*own.values()]}

    def take_gradients(self, factor: float = 1.0) -> None:
        """Upcast the gradients of the parameters, and multiply them."""
        for parameter, master in self._masters.items():
            gradient = parameter.grad
            master.grad = None
            if gradient is not None:
                master.grad = local(gradient).detach().clone().float() * factor

    def step(self) -> None:
        """Step with the gradients that there are."""
        self.take_gradients()
        self.step_taken()

    def step_taken(self) -> None:
        """Step the masters, and round them into the parameters."""
        self.inner.step()
        with torch.no_grad():
            for parameter, master in self._masters.items():
                if master.grad is not None:
                    local(parameter).copy_(master)

    def gradients(self) -> list[torch.Tensor]:
        """Return masters with the gradients that were taken; those of DTensors are DTensors."""
        found = []
        for parameter, master in self._masters.items():
            if master.grad is not None:
                held = master.clone()
                held.grad = master.grad
                if isinstance(parameter.grad, DTensor):
                    held = like(held, parameter)
                    held.grad = like(master.grad, parameter)
                found.append(held)
        return found

    def close(self) -> None:
        """Do nothing."""


def like(tensor: torch.Tensor, parameter: DTensor) -> DTensor:
    """Return a DTensor of a local tensor, which is divided as a parameter is."""
    mesh, shape, strides = parameter.device_mesh, parameter.shape, parameter.stride()
    return DTensor.from_local(
        tensor, mesh, parameter.placements, run_check=False, shape=shape, stride=strides
    )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
