"""Replicas of a model on several ranks of one process, whose parameters are dealt by rows."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from offload.format.shares.dealing import deal_rows
from offload.model.shards import Shards, own_shards, uncounted
from tests.ranks.rank import Rank

SHAPES = {
    "embedding": (33, 64),
    "odd": (70, 7),
    "convolution": (5, 3, 2, 2),
    "bias": (1500,),
    "scale": (),
    "nothing": (0, 4),
    "last": (9, 96),
}


class Model(torch.nn.Module):
    """Parameters of many shapes, one of them frozen, and a buffer."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        for name, shape in SHAPES.items():
            values = torch.randn(shape, generator=generator).to(dtype)
            self.register_parameter(name, torch.nn.Parameter(values))
        self.frozen = torch.nn.Parameter(torch.ones(3, 3), requires_grad=False)
        self.register_buffer("mean", torch.zeros(4))

    def give_gradients(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        for parameter in self.parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if parameter.requires_grad:
                parameter.grad = values.to(parameter.dtype)
        if step == 2:
            self.odd.grad = None

    def groups(self) -> list[dict[str, Any]]:
        named = [*self.named_parameters()]
        return [{"params": named[:3]}, {"params": named[3:], "lr": 0.02}]


class Replicas:
    """A model on each of several ranks, which step their rows and give them to the others."""

    def __init__(
        self,
        num_ranks: int,
        dtype: torch.dtype,
        directory: Path,
        optimizer_class: type[torch.optim.Optimizer],
        *,
        multiple: int = 1,
        **settings: Any,
    ) -> None:
        self.dealt = [dict(view) for view in deal_rows(SHAPES, num_ranks, multiple)]
        self.models = [Model(dtype) for _ in range(num_ranks)]
        self.ranks = [
            Rank(
                optimizer_class,
                model.groups(),
                directory / str(number),
                self.shards(number),
                model=model,
                **settings,
            )
            for number, model in enumerate(self.models)
        ]

    def shards(self, rank: int) -> Shards:
        return own_shards(self.dealt[rank], SHAPES, keeps_others=rank == 0)

    def step(self, step: int) -> None:
        for model, rank in zip(self.models, self.ranks, strict=True):
            model.give_gradients(step)
            rank.step()
        self.gather()

    def gather(self) -> None:
        """Give the rows of each rank to the others, as a collective does in a real training."""
        for number, (model, own) in enumerate(zip(self.models, self.dealt, strict=True)):
            for name, cut in own.items():
                rows = model.get_parameter(name).detach()[cut.box.slices]
                for other in [m for n, m in enumerate(self.models) if n != number]:
                    uncounted(other.get_parameter(name))[cut.box.slices].copy_(rows)

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


def arrays_of(checkpoint: str) -> dict[str, dict[str, torch.Tensor]]:
    """Return the state arrays of a checkpoint by the names in its files; flat parts are joined."""
    body = json.loads((Path(checkpoint) / "manifest.json").read_text())["body"]
    found: dict[str, dict[str, torch.Tensor]] = {}
    for array, _, _ in body["arrays"]:
        whole, parts = found.setdefault(array, {}), dict[str, dict[int, torch.Tensor]]()
        for key, tensor in safetensors.torch.load_file(f"{checkpoint}/{array}.safetensors").items():
            part = re.fullmatch(r"(.+)\[(\d+):\d+\]", key)
            if part is None:
                whole[key] = tensor
            else:
                parts.setdefault(part[1], {})[int(part[2])] = tensor
        for key, pieces in parts.items():
            whole[key] = torch.cat([pieces[start] for start in sorted(pieces)])
    return found


def elements(tensors: Mapping[str, torch.Tensor], names: list[str]) -> torch.Tensor:
    """Return tensors end to end, flat."""
    return torch.cat([tensors[name].flatten() for name in names])
