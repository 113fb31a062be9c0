"""Training step by step, for tests of what happens to its store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gds import Backend
from offload import AdamW, DriveTuning, open_checkpoint
from tests.stores.training import (
    Model,
    Reference,
    backward,
    differences,
    optimizer_for,
    options,
)

STORE = "/run"


class Training:
    """A model and its optimizer; the gradients of each step depend on its number.

    Args:
        backend: Has the files.
        directories: Of the store; state is divided evenly if there are several.
        reader_timeout_s: A setting of `Options`, as is `host_memory`.
        changes: Other arguments of the constructor.
    """

    def __init__(
        self,
        backend: Backend,
        directories: str | Sequence[str] = STORE,
        *,
        reader_timeout_s: float = 0.2,
        host_memory: int | str = 0,
        **changes: Any,
    ) -> None:
        self.backend = backend
        self.model = Model()
        shares = (1,) if isinstance(directories, str) else (1,) * len(directories)
        settings = options(
            backend,
            reader_timeout_s=reader_timeout_s,
            host_memory=host_memory,
            drives=DriveTuning(shares=shares),
        )
        self.optimizer: AdamW = optimizer_for(self.model, directories, settings, **changes)

    def step(self) -> None:
        with torch.enable_grad():  # it may be called in the middle of a reader, which needs none
            backward(self.model, self.optimizer.num_steps + 1)
        self.optimizer.step()

    def steps_and_seal(self, num_steps: int = 1) -> str:
        """Take steps, seal the last one, and return the path of the checkpoint."""
        for _ in range(num_steps):
            self.step()
        return self.optimizer.checkpoint().result().path

    def differences(self, step: int) -> list[str]:
        """Say what of the newest checkpoint, as a reader finds it, is not that of a step."""
        with open_checkpoint(STORE, backend=self.backend) as found:
            return differences(found, self.backend, Reference().after(step))
