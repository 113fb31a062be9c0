"""A check that a refusal changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gds import Backend
from offload import OffloadedOptimizer
from tests.stores.files import everything

Tensors = dict[str, torch.Tensor]


def bits(model: torch.nn.Module) -> dict[str, bytes]:
    """Return the bytes of every parameter and buffer that is stored."""
    return {n: t.detach().numpy(force=True).tobytes() for n, t in _as_bytes(model).items()}


def _as_bytes(model: torch.nn.Module) -> Tensors:
    return {
        n: t.detach().reshape(-1).contiguous().view(torch.uint8)
        for n, t in model.state_dict().items()
        if t.numel()
    }


@contextmanager
def nothing_changes(
    backend: Backend, model: torch.nn.Module, optimizer: OffloadedOptimizer | None = None
) -> Iterator[None]:
    """Check that files, live tensors and hyper-parameters are what they were."""

    def state() -> object:
        listed = optimizer.param_groups if optimizer else []
        groups = [{k: v for k, v in group.items() if k != "params"} for group in listed]
        return everything(backend), bits(model), copy.deepcopy(groups)

    before = state()
    yield
    assert state() == before
