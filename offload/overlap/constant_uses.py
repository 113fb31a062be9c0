"""Finding, in a forward, parameters whose values backward needs as constants.

A parameter whose gradient is final may be stepped at once if nothing needs its value any more. A
use with a graph is done by then, as its own part of backward comes first. A use without one says
nothing of itself: the value may be in the graph as a constant, by ``p.data`` or ``p.detach()``, or
may be read again where activation checkpointing computes something anew. So every use of a
parameter is looked at from the first forward to the first gradient. After that this is done only
from a call of a kind that has not been seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from offload.model.tensors_in import tensors_in
from offload.model.watch import Watch
from offload.overlap import compiling
from offload.overlap.autograd_context import backward_id, function_call, is_recomputed_later

_T: Any = torch.Tensor
_LOOKS = {_T.dim, _T.ndimension, _T.__len__, _T.type, _T.is_same_size, torch.is_tensor}
"""Functions whose results do not depend on values, beside those that nobody is asked about."""


class ConstantUses:
    """Watches parameters from `begin` to `end`, or until it has found such a use.

    Args:
        found: Called when it has, on the thread of the user.
    """

    def __init__(self, found: Callable[[], None]) -> None:
        self._found = found
        self._watch = Watch(lambda _: True, "looked at in the first forward", self._used)
        self._with_graph: set[int] = set()
        """By id: parameters that have been used so that they get a gradient."""
        self._in_functions: dict[int, int] = {}
        """By id: those that a `torch.autograd.Function` has used, which may do so again; and which
        call of one."""
        self._key = compiling.follow(self)
        self._is_looking = False

    def begin(self, modules: Iterable[torch.nn.Module], trained: Iterable[torch.Tensor]) -> None:
        """Watch what is trained, but for what compiled modules have.

        Args:
            modules: Those that may run.
            trained: Parameters.
        """
        if self._is_looking:
            return
        self._is_looking = True
        self._with_graph.clear()
        self._in_functions.clear()
        compiled = filter(compiling.is_compiled, modules)
        left_alone = {id(p) for module in compiled for p in module.parameters()}
        compiling.listen()
        self._watch.add(p for p in trained if id(p) not in left_alone)

    def end(self) -> None:
        """Watch nothing any more."""
        if self._is_looking:
            self._is_looking = False
            self._watch.release_all()

    def _used(self, tensor: torch.Tensor, function: Callable[..., Any], result: Any) -> None:
        """Look at a use of a parameter, which has returned its result."""
        if function in _LOOKS or not self._is_looking or backward_id() != -1:
            return
        key = id(tensor)
        results = list(tensors_in(result))
        has_graph = torch.is_grad_enabled() and tensor.requires_grad
        if has_graph and any(made.requires_grad for made in results):
            self._with_graph.add(key)
        elif (call := function_call()) is not None:
            if self._in_functions.setdefault(key, call) != call:
                self._with_graph.add(key)  # another call gets a gradient for it
        elif not (
            is_recomputed_later()
            or (torch.is_grad_enabled() and not tensor.requires_grad)
            or any(_shares_memory(made, tensor) for made in results)
        ):
            return  # what was computed is a value of its own
        else:
            self._with_graph.add(key)
            self._in_functions[key] = 0
        if key in self._with_graph and key in self._in_functions:
            self.end()
            self._found()

    def before_compiled(self, number: int) -> None:
        """Do nothing: the hooks of this mode are not compiled."""

    @property
    def knows_compiled(self) -> bool:
        """Whether the model is known to be compiled."""
        return not self._is_looking

    def compiling_begins(self) -> None:
        """Let what is compiled find ordinary parameters."""
        self._watch.pause()

    def compiling_ended(self) -> None:
        """Go on."""
        self._watch.resume()


def _shares_memory(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    try:
        own, others = (t.untyped_storage().data_ptr() for t in (tensor, other))
    except (NotImplementedError, RuntimeError):
        return True  # it is of a class that does not say
    return own == others
