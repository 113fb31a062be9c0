"""A small training whose every step is known beforehand, near and in a local store."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import offload
from tests.limits import AGREEMENT_S

CHUNK_BYTES = 16 << 10


def options(timeout_s: float = AGREEMENT_S, **others: Any) -> offload.Options:
    """Return settings for small chunks, so that a step has several."""
    return offload.Options(
        chunk_bytes=CHUNK_BYTES,
        agreement_timeout_s=timeout_s,
        drives=offload.DriveTuning(calibrate=False),
        **others,
    )


def make_model() -> torch.nn.Module:
    """Return a model with buffers that every forward changes, the same each time."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(96, 128), torch.nn.BatchNorm1d(128), torch.nn.Linear(128, 160)
    ).bfloat16()


def make_optimizer(
    model: torch.nn.Module, directory: str | Path, timeout_s: float = AGREEMENT_S, **more: Any
) -> offload.OffloadedOptimizer:
    """Return AdamW of a model."""
    return offload.AdamW(
        model.parameters(),
        lr=1e-2,
        directory=directory,
        model=model,
        **{"options": options(timeout_s), **more},
    )


def backward(model: torch.nn.Module, step: int) -> None:
    """Compute the gradients of a step, which follow from its number and the model."""
    torch.manual_seed(step)
    model.zero_grad()
    model(torch.randn(8, 96).bfloat16()).float().square().mean().backward()


def train(
    model: torch.nn.Module, optimizer: offload.OffloadedOptimizer, first: int, last: int
) -> None:
    """Take steps, from one number to another."""
    for step in range(first, last + 1):
        backward(model, step)
        optimizer.step()


def copied(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the values of a model's state dict."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def are_same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Return whether two state dicts have the same bits."""
    return one.keys() == other.keys() and all(
        torch.equal(one[n].reshape(-1).view(torch.uint8), other[n].reshape(-1).view(torch.uint8))
        for n in one
    )


def expected(directory: Path, last: int) -> list[dict[str, torch.Tensor]]:
    """Return the values after each number of steps, from a store on this machine."""
    model = make_model()
    found = [copied(model)]
    with make_optimizer(model, directory) as optimizer:
        for step in range(1, last + 1):
            train(model, optimizer, step, step)
            found.append(copied(model))
        optimizer.checkpoint().result()
    return found
