"""What the first forward tells: which modules run in which order, and who reads which parameter.

Modules say when they are about to run, through their pre-forward hooks; a torch function mode sees
every parameter that an operation takes. Together they show for each parameter whether waiting in
the hook of the module that owns it is early enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode

OUTSIDE = -2
"""No operation of the forward took the parameter: if it has a gradient, it is read elsewhere."""

AT_ENTRY = -1
"""An operation took it before any module that owns it ran, as with attention's ``out_proj``."""

_T: Any = torch.Tensor  # property objects have no __get__ in the eyes of a type checker
_NOT_READING = {
    getattr(_T, name).__get__
    for name in ("dtype", "device", "shape", "ndim", "layout", "requires_grad", "is_leaf", "grad")
} | {_T.size, _T.dim, _T.numel, _T.is_floating_point, _T.stride, _T.is_contiguous}


class ForwardOrder:
    """A record of one forward, or of several.

    Args:
        parameters: Those to watch.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = {id(parameter): parameter for parameter in parameters}
        self._turns: dict[int, int] = {}
        """By id of a parameter: when a module that owns it first ran."""
        self._ready: set[int] = set()
        """Parameters whose module has run in the present forward."""
        self._early: set[int] = set()
        self._seen: set[int] = set()
        self._num_ran = 0
        self._mode = _Uses(self._use)

    def begin(self) -> None:
        """Watch the operations of this thread, until `end`."""
        self._ready.clear()
        self._mode.enter()

    def end(self) -> None:
        """Stop watching."""
        self._mode.leave()

    def ran(self, own: Iterable[torch.Tensor]) -> None:
        """Note that a module is about to run, which owns these parameters."""
        for parameter in own:
            self._turns.setdefault(id(parameter), self._num_ran)
            self._ready.add(id(parameter))
        self._num_ran += 1

    def rank(self, parameter: torch.Tensor) -> int:
        """Return when a parameter is first used: `OUTSIDE`, `AT_ENTRY`, or its turn from 0."""
        if id(parameter) not in self._seen:
            return OUTSIDE
        return AT_ENTRY if id(parameter) in self._early else self._turns[id(parameter)]

    def _use(self, tensor: torch.Tensor) -> None:
        if id(tensor) in self._parameters:
            self._seen.add(id(tensor))
            if id(tensor) not in self._ready:
                self._early.add(id(tensor))


class _Uses(TorchFunctionMode):
    """Reports every tensor that an operation takes."""

    def __init__(self, report: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._report = report
        self._active = False

    def enter(self) -> None:
        if not self._active:
            self._active = True
            self.__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        self._active = False
        # After a KeyboardInterrupt another mode may lie above: then this one stays, and is idle.
        if _get_current_function_mode() is self:  # type: ignore[no-untyped-call]
            self.__exit__(None, None, None)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if self._active and func not in _NOT_READING:
            self._walk((args, kwargs))
        return func(*args, **(kwargs or {}))

    def _walk(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._report(value)
        elif isinstance(value, (list, tuple)):
            for item in value:
                self._walk(item)
        elif isinstance(value, dict):
            self._walk(list(value.values()))
