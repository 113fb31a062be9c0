"""Calls of ranks on several hosts, for `Calls.do`: what a host without the checkpoints is told."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from offload.store import frozen_space
from tests.ranks_training.calls import Calls


class MostlyFrozen(torch.nn.Module):
    """A model of which little is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(5, 3)])
        self.frozen = torch.nn.Parameter(torch.ones(1000), requires_grad=False)

    def forward(self, x: torch.Tensor, *, uses_all: bool = True) -> torch.Tensor:
        """Return the output."""
        return self.layers[0](x)


def freeze_most(calls: Calls) -> None:
    """Train a model of which most is frozen, and let few bytes be worth a warning."""
    frozen_space._LEAST_BYTES = 1
    torch.manual_seed(7)
    calls.model = DistributedDataParallel(MostlyFrozen().bfloat16())


def sealed_train_state(calls: Calls) -> Any:
    """Return the train state of the checkpoint that a handle has, or the error that it raises."""
    try:
        return calls.handle.result().train_state
    except Exception as error:  # noqa: BLE001  (the test looks at it)
        return str(error)


def generation(calls: Calls) -> int:
    """Return the generation of the present state."""
    found: int = calls.optimizer.position.generation
    return found
