"""A small training run for tests of what a store keeps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gds import Backend, MemoryBackend
from offload import list_checkpoints
from tests.stores.small import STORE, make_model, make_optimizer

_open: list[Run] = []


@pytest.fixture(autouse=True)
def closed_runs() -> Iterator[None]:
    """Close the runs of a test, in every module that imports this, when it ends."""
    yield
    while _open:
        _open.pop().optimizer.close()


class Run:
    """A small model in training, step by step.

    Args:
        backend: Backend that has the store; by default a new one in memory.
        changes: Arguments of the optimizer, and ``overlap``.
    """

    def __init__(self, backend: Backend | None = None, **changes: Any) -> None:
        self.backend = backend or MemoryBackend()
        (self.model,) = make_model(60, 40)
        settings = {"overlap": changes.pop("overlap", None)}
        self.optimizer = make_optimizer(
            self.model, self.backend, lr=1e-2, settings=settings, **changes
        )
        _open.append(self)

    @property
    def at(self) -> int:
        """Number of steps taken."""
        return self.optimizer.num_steps

    def backward(self) -> None:
        """Compute the gradients of the next step, which depend on its number."""
        generator = torch.Generator().manual_seed(self.at)
        x = torch.randn(4, 60, generator=generator).to(torch.bfloat16)
        self.model(x).float().square().mean().backward()

    def step(self, num: int = 1) -> None:
        """Take steps."""
        for _ in range(num):
            self.optimizer.zero_grad()
            self.backward()
            self.optimizer.step()

    def seal(self, num_steps: int = 1, **metrics: float) -> str:
        """Take steps and make a checkpoint; return its path."""
        self.step(num_steps)
        return self.optimizer.checkpoint({"at": self.at}, metrics=metrics or None).result().path

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, having checked that readers can use them."""
        found = list_checkpoints(STORE, backend=self.backend)
        assert all(info.valid for info in found)
        return [info.step for info in found]

    def slots(self) -> list[str]:
        """Return the names of all slots, the sealed ones included."""
        names = self.backend.list_dir(STORE)
        return [name for name in names if name.startswith((".slot-", "step-"))]

    def next_process(self, **changes: Any) -> Run:
        """End this run, and return one that has restored its newest checkpoint."""
        self.optimizer.close()
        assert isinstance(self.backend, MemoryBackend)
        successor = Run(self.backend.reopened(), **changes)
        successor.optimizer.restore()
        return successor

    def parameters(self) -> list[torch.Tensor]:
        """Return copies of the live parameters."""
        return [p.detach().clone() for p in self.model.parameters()]


def name_of(step: int) -> str:
    """Return the name of the checkpoint of a step."""
    return f"step-{step:08d}"


def slot_bytes() -> int:
    """Return the size of a slot of such a run, in bytes."""
    run = Run(keep=1)
    run.seal()
    found = list_checkpoints(STORE, backend=run.backend)[0].bytes
    run.optimizer.close()
    return found
