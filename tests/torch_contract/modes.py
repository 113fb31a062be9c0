"""Every mode of torch that may be on when a method of this package is called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

Mode = Callable[[], AbstractContextManager[Any]]


@contextmanager
def default_device(device: str) -> Iterator[None]:
    """Make tensors on another device, where nobody says which."""
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make tensors of another dtype, where nobody says of which."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic() -> Iterator[None]:
    """Refuse operations that are not deterministic, and fill new memory with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def flush_denormal() -> Iterator[None]:
    """Let arithmetic of this thread take denormal numbers for zero."""
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


class Watching(TorchFunctionMode):
    """A mode of the user that notes the names of what is called, and changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.add(resolve_name(func) or str(func))
        return func(*args, **(kwargs or {}))


class Spoiling(TorchFunctionMode):
    """A mode of the user that turns what new tensors are made of into something else."""

    MADE = (torch.empty, torch.zeros, torch.ones, torch.full, torch.tensor, torch.arange)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        return made.to(torch.float64).add(1) if func in self.MADE else made


class Passing(TorchDispatchMode):
    """Sees every operation, and lets it pass."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


MODES: dict[str, Mode] = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "set_grad_enabled": lambda: torch.set_grad_enabled(False),
    "device_context": lambda: torch.device("meta"),
    "default_device": lambda: default_device("meta"),
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float16": lambda: default_dtype(torch.float16),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "deterministic": deterministic,
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "flush_denormal": flush_denormal,
    "function_mode": Spoiling,
    "dispatch_mode": Passing,
}
"""By name. "meta" stands for a device that the parameters are not on."""
