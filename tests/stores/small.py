"""Small stores for tests that need some checkpoints, and not what exactly is in them.

A test that compares every bit with the same training in memory uses `tests.stores.training`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any

import torch

from gds import Backend, MemoryBackend
from offload import AdamW, OffloadedOptimizer, Options

STORE = "/run"
"""Directory of a store in a backend that has no other."""

CHUNK_BYTES = 4096


def make_model(
    *widths: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> torch.nn.Sequential:
    """Return linear layers; torch's random state stays as it is.

    Args:
        widths: Number of features before and after each layer; by default 30, 40, 4, which is one
            chunk for the first weight and less than one for each other parameter.
        dtype: Dtype of all parameters.
        seed: Seed of the values.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [torch.nn.Linear(a, b) for a, b in pairwise(widths or (30, 40, 4))]
        return torch.nn.Sequential(*layers).to(dtype)


def make_mixed_model(seed: int = 0) -> torch.nn.Sequential:
    """Return two layers in bf16 below one in FP32, which has no separate masters."""
    model = make_model(40, 33, 7, 3, dtype=torch.float32, seed=seed)
    model[:2].bfloat16()
    return model


def options(backend: Backend | None = None, **changes: Any) -> Options:
    """Return settings for small chunks, on any file system.

    Args:
        backend: Backend that has the files; None for the file system of the machine.
        changes: Other settings of `Options`.
    """
    settings = {
        "backend": backend,
        "allow_volatile": True,
        "chunk_bytes": CHUNK_BYTES,
        "train_state_bytes": 8192,
    }
    return Options(**{**settings, **changes})


def make_optimizer(
    trained: torch.nn.Module,
    backend: Backend | None = None,
    optimizer_class: Callable[..., OffloadedOptimizer] = AdamW,
    *,
    settings: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> OffloadedOptimizer:
    """Construct an optimizer for a model.

    Args:
        trained: Model to train; also the optimizer's ``model=``, unless `arguments` says otherwise.
        backend: Backend that has the store; None for the file system of the machine.
        optimizer_class: Class to construct.
        settings: Settings of `Options` that are not those of `options`.
        arguments: Arguments of the class; ``params`` are all parameters of the model by default,
            and ``directory`` is `STORE`.
    """
    chosen = {
        "params": trained.parameters(),
        "directory": STORE,
        "model": trained,
        "options": options(backend, **settings or {}),
        **arguments,
    }
    return optimizer_class(chosen.pop("params"), **chosen)


def give_gradients(parameters: Iterable[torch.Tensor], number: int) -> None:
    """Give parameters gradients that depend on a number, and on the shapes of the parameters.

    Args:
        parameters: Parameters in the order in which gradients are drawn, the frozen ones included.
        number: Seed of the gradients.
    """
    generator = torch.Generator().manual_seed(number)
    for parameter in parameters:
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = gradient.to(parameter.dtype)


def step(optimizer: OffloadedOptimizer, number: int | None = None) -> None:
    """Take a step with gradients of a number, by default the number of steps taken so far."""
    number = optimizer.num_steps if number is None else number
    give_gradients((p for group in optimizer.param_groups for p in group["params"]), number)
    optimizer.step()


def train(
    optimizer: OffloadedOptimizer,
    num_steps: int,
    *,
    seal_at: Iterable[int] | None = None,
    losses: Mapping[int, float] | None = None,
) -> list[str]:
    """Take steps, and make checkpoints whose train state is ``{"step": number}``.

    Args:
        optimizer: Optimizer, which goes on from where it is.
        num_steps: Number of steps to take.
        seal_at: Steps of which a checkpoint is made, by number; None for all of them.
        losses: Metric ``loss`` of the checkpoints, by step.

    Returns:
        Paths of the checkpoints.
    """
    chosen = None if seal_at is None else {*seal_at}
    paths = []
    for _ in range(num_steps):
        step(optimizer)
        number = optimizer.num_steps
        if chosen is None or number in chosen:
            metrics = {"loss": losses[number]} if losses else None
            paths.append(optimizer.checkpoint({"step": number}, metrics=metrics).result().path)
    return paths


def memory_store(num_checkpoints: int = 2, **arguments: Any) -> MemoryBackend:
    """Return files with checkpoints of steps 1, 2, ..., made by a process that has ended.

    Args:
        num_checkpoints: Number of checkpoints; all are kept.
        arguments: Other arguments of `make_optimizer`.
    """
    backend = MemoryBackend()
    with make_optimizer(make_model(), backend, keep=num_checkpoints, **arguments) as optimizer:
        train(optimizer, num_checkpoints)
    return backend.reopened()
