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
def switched(switch: Callable[[Any], object], on: Any, off: Any) -> Iterator[None]:
    """Be in a mode that is a setting of torch."""
    switch(on)
    try:
        yield
    finally:
        switch(off)


def default_dtype(dtype: torch.dtype) -> AbstractContextManager[None]:
    """Make tensors of another dtype, where nobody says of which."""
    return switched(torch.set_default_dtype, dtype, torch.float32)


def flush_denormal() -> AbstractContextManager[None]:
    """Let arithmetic of this thread take denormal numbers for zero."""
    return switched(torch.set_flush_denormal, True, False)


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
    "default_device": lambda: switched(torch.set_default_device, "meta", None),
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float16": lambda: default_dtype(torch.float16),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "deterministic": lambda: switched(torch.use_deterministic_algorithms, True, False),
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "flush_denormal": flush_denormal,
    "function_mode": Spoiling,
    "dispatch_mode": Passing,
}
"""By name. "meta" stands for a device that the parameters are not on."""
