"""Calls of a rank within a mode of torch, for `Calls.do`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from tests.ranks_training.calls import Calls


@contextmanager
def double_precision() -> Iterator[None]:
    """Let FP64 be the default dtype."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "": nullcontext,
    "inference": torch.inference_mode,
    "no grad": torch.no_grad,
    "float64": double_precision,
    "meta": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


def within(calls: Calls, mode: str, name: str, *arguments: Any) -> Any:
    """Make a call within a mode."""
    with MODES[mode]():
        return getattr(calls, name)(*arguments)


def step(calls: Calls, mode: str) -> None:
    """Take a step, of which `optimizer.step` is called within a mode."""
    calls.backward()
    within(calls, mode, "update")
