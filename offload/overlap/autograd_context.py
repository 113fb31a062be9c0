"""Queries about the state of autograd on the calling thread."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch

_function: Any = torch.autograd.Function
_APPLY = _function.apply.__func__.__code__


def backward_id() -> int:
    """Return a number for the backward that runs on this thread; -1 outside of any backward."""
    task: int = torch._C._current_graph_task_id()
    return task


def is_recomputed_later() -> bool:
    """Return whether the caller runs under hooks that replace the tensors autograd saves.

    Activation checkpointing with ``use_reentrant=False`` sets such hooks when it runs a function
    that it will run again in backward.
    """
    autograd: Any = torch._C._autograd
    return autograd._top_saved_tensors_default_hooks(True) is not None


def is_in_function() -> bool:
    """Return whether the caller is within the forward of a `torch.autograd.Function`.

    Reentrant activation checkpointing runs modules in such a forward, and again in backward.
    """
    return function_call() is not None


def function_call() -> int | None:
    """Return a number for the outermost `torch.autograd.Function` whose forward runs the caller.

    The number is the id of the call's context, which lives as long as the graph. It is 0 for a
    function that does not get its context, and None outside of any such forward.
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
