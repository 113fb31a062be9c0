"""Search, during a forward, for parameters whose values backward needs as constants.

Autograd has passed a use that it recorded when the gradient is final. A use that is not recorded
(``p.data``, ``p.detach()``, activation checkpointing) may need the value later. So every use is
examined from the first forward to the first gradient, and again when a module is called in a new
way. This module also asks what autograd is doing on the calling thread.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch

from offload.model.watch import Watch, tensors_in
from offload.overlap import compiling

_T: Any = torch.Tensor
_VALUE_INDEPENDENT = {_T.dim, _T.ndimension, _T.__len__, _T.type, _T.is_same_size, torch.is_tensor}
"""Functions whose results do not depend on values, beyond those that `Watch` does not report."""


class ConstantUses(compiling.Follower):
    """Watch on parameters from `begin` to `end`, or until a parameter is used as a constant."""

    def __init__(self, found: Callable[[], None]) -> None:
        self._found = found
        self._watch = Watch(lambda _: True, "looked at in the first forward", self._examine)
        self._with_graph: set[int] = set()
        """Ids of parameters whose uses give them a gradient."""
        self._in_functions: dict[int, int] = {}
        """Number of the call in which a `torch.autograd.Function` used a parameter, by id of the
        parameter. The function may use it again in backward."""
        self._key = compiling.follow(self)
        self._is_watching = False

    def begin(self, modules: Iterable[torch.nn.Module], trained: Iterable[torch.Tensor]) -> None:
        """Watch the trained parameters, except those of compiled modules."""
        if self._is_watching:
            return
        self._is_watching = True
        self._with_graph.clear()
        self._in_functions.clear()
        compiled = filter(compiling.is_compiled, modules)
        left_alone = {id(p) for module in compiled for p in module.parameters()}
        compiling.listen()
        self._watch.add(p for p in trained if id(p) not in left_alone)

    def end(self) -> None:
        """Stop watching."""
        if self._is_watching:
            self._is_watching = False
            self._watch.release_all()

    def _examine(self, tensor: torch.Tensor, function: Callable[..., Any], result: Any) -> None:
        """Examine a use of a parameter: the function that was called, and its result."""
        if function in _VALUE_INDEPENDENT or not self._is_watching or backward_id() != -1:
            return
        key = id(tensor)
        results = list(tensors_in(result))
        has_graph = torch.is_grad_enabled() and tensor.requires_grad
        if has_graph and any(made.requires_grad for made in results):
            self._with_graph.add(key)
        elif (call := function_call()) is not None:
            if self._in_functions.setdefault(key, call) != call:
                self._with_graph.add(key)  # another call gives the parameter a gradient
        elif not (
            is_recomputed_later()
            or (torch.is_grad_enabled() and not tensor.requires_grad)
            or any(_shares_memory(made, tensor) for made in results)
        ):
            return  # the result does not share memory with the parameter
        else:
            self._with_graph.add(key)
            self._in_functions[key] = 0
        if key in self._with_graph and key in self._in_functions:
            self.end()
            self._found()

    def compiling_begins(self) -> None:
        """Pause the watch, so that the compiler finds parameters of ordinary classes."""
        self._watch.pause()

    def compiling_ended(self) -> None:
        """Resume the watch."""
        self._watch.resume()


def _shares_memory(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    try:
        own, others = (t.untyped_storage().data_ptr() for t in (tensor, other))
    except (NotImplementedError, RuntimeError):
        return True  # the class of the tensor does not tell where its memory is
    return own == others


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
