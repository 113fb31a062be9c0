"""Optimizer of this project on plain parameters without a model, ready to be timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch

import offload

STATE_ARRAYS = 3
"""Number of state arrays: FP32 master and two moments."""

_WARM_UP_STEPS = 2
_LEARNING_RATE = 1e-4


def exact_state_bytes(num_parameters: int) -> int:
    """Return the bytes of FP32 state. A step reads as many, and writes as many."""
    return num_parameters * 4 * STATE_ARRAYS


class Streamed:
    """AdamW with its state on the drive, and fixed gradients.

    Args:
        directory: Directory of the store.
        parameters: Parameters of the optimizer, in bf16.
        gradients: Gradients of the parameters, the same at every step.
        label: Name in results.
        settings: Arguments of `offload.Options`. A backend in them is closed at the end.
        keep: Number of checkpoints to keep.
        settle: Function that waits until the device of the parameters is idle.
    """

    def __init__(
        self,
        directory: str,
        parameters: list[torch.nn.Parameter],
        gradients: list[torch.Tensor],
        label: str,
        settings: dict[str, Any],
        *,
        keep: int = 1,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self.label = label
        self._settle = settle
        self.parameters = parameters
        self._backend = settings.get("backend")
        self.optimizer = offload.AdamW(
            parameters,
            lr=_LEARNING_RATE,
            weight_decay=0.1,
            directory=directory,
            keep=keep,
            options=offload.Options(**settings),
        )
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        # The first steps make the state, and write to space that is only reserved.
        self.sample(_WARM_UP_STEPS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.optimizer.close()
        if self._backend is not None:
            self._backend.close()

    def sample(self, steps: int) -> float:
        """Return the seconds of one step, as the mean of several steps back to back.

        Between the calls nothing is in flight, and the ring has the first chunks of the next step.
        """
        self.optimizer.synchronize()
        self._settle()
        started = time.perf_counter()
        for _ in range(steps):
            self.optimizer.step()
        self.optimizer.synchronize()
        self._settle()
        return (time.perf_counter() - started) / steps

    def bytes_of(self, steps: int) -> tuple[int, int]:
        """Take steps, and return the bytes that they read and wrote."""
        self.optimizer.synchronize()
        before = self.optimizer.stats()
        self.sample(steps)
        after = self.optimizer.stats()
        return after.bytes_read - before.bytes_read, after.bytes_written - before.bytes_written
