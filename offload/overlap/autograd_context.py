"""Where in the work of autograd the calling code runs."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch

_function: Any = torch.autograd.Function
_APPLY = _function.apply.__func__.__code__


def backward_id() -> int:
    """Return a number for the backward that this thread is in; -1 outside of any."""
    task: int = torch._C._current_graph_task_id()
    return task


def is_recomputed_later() -> bool:
    """Return whether the caller is where saved tensors are replaced.

    That is how activation checkpointing with ``use_reentrant=False`` runs a function that it will
    run again in backward.
    """
    autograd: Any = torch._C._autograd
    return autograd._top_saved_tensors_default_hooks(True) is not None


def is_in_function() -> bool:
    """Return whether the caller is within the forward of a `torch.autograd.Function`.

    That is how reentrant activation checkpointing runs modules, to run them again in backward.
    """
    return function_call() is not None


def function_call() -> int | None:
    """Return a number for the outermost such forward that the caller is in; None outside of any.

    It is that of the call's context, which lives as long as the graph. A function that is not given
    its context has 0.
    """
    found = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "forward" and code.co_varnames[:1] == ("ctx",):
            found = id(frame.f_locals.get("ctx"))
        elif code is _APPLY and not found:
            found = 0
        frame = frame.f_back
    return found
