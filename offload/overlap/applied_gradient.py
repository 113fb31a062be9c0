"""Placeholder in ``.grad`` for a gradient that has been applied; it refuses to be used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from offload.errors import OverlapError

REMEDY = 'use Options(overlap="forward"), which is exact with clipping, scaling and accumulation'

_T: Any = torch.Tensor  # property objects have no __get__ in the eyes of a type checker
_HARMLESS = {
    getattr(_T, name).__get__
    for name in ("grad_fn", "is_sparse", "dtype", "device", "shape", "layout", "requires_grad")
} | {_T.requires_grad_, _T.detach_, _T.is_complex, _T.is_floating_point, _T.size, _T.numel, _T.dim}
"""Functions that ``zero_grad`` calls on a gradient, or that do not depend on its values."""


class AppliedGradient(torch.Tensor):
    """Placeholder with the shape, dtype and device of a gradient, and without memory.

    All modes of ``zero_grad`` work on it. Every other use that depends on the values raises
    `OverlapError`, which names the parameter.

    Args:
        gradient: The gradient that has been applied.
        name: Name of the parameter.
        refuse: Function that is called with a reason if a use leaves the state half stepped. It
            returns the error to raise.
    """

    @staticmethod
    def __new__(cls: type[AppliedGradient], gradient: torch.Tensor, *_: object) -> AppliedGradient:
        """Make a tensor without memory."""
        make: Any = torch.Tensor._make_wrapper_subclass
        made: AppliedGradient = make(
            cls, gradient.shape, dtype=gradient.dtype, device=gradient.device
        )
        return made

    def __init__(
        self, _gradient: torch.Tensor, name: str, refuse: Callable[[str], OverlapError]
    ) -> None:
        super().__init__()
        self.parameter_name = name
        self.cleared = False
        """Whether the gradient has been set to zero since it was applied."""
        self._refuse = refuse

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<the gradient of {self.parameter_name!r}, applied already>"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Refuse uses by Python code, except those that are harmless or clear the gradient."""
        with torch._C.DisableTorchFunctionSubclass():
            if func in _HARMLESS:
                return func(*args, **(kwargs or {}))
            found = list(_applied((args, kwargs)))
            if func is _T.zero_:
                found[0].cleared = True
                return found[0]
            if func is torch._foreach_zero_:
                for gradient in found:
                    gradient.cleared = True
                others = [g for g in args[0] if not isinstance(g, AppliedGradient)]
                return func(others) if others else None
            if func is torch._amp_foreach_non_finite_check_and_unscale_:
                raise found[0]._refuse(
                    "GradScaler.unscale_() found that scaled gradients had been applied"
                )
            raise OverlapError(
                f"{getattr(func, '__name__', func)}() was called on the gradient of "
                f"{found[0].parameter_name!r}, which has been applied in backward() already "
                f'(overlap="backward"): gradients can neither be read nor changed. To do so, '
                f"{REMEDY}"
            )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Refuse uses by autograd, which only ever adds another gradient."""
        gradient = next(_applied((args, kwargs)))
        raise gradient._refuse(second_backward_message(gradient.parameter_name))


def second_backward_message(name: str) -> str:
    """Return the message about a second gradient for a parameter called `name`."""
    return (
        f"the gradient of {name!r} had been applied already when more was added to it before "
        "step(): by a second backward(), by another loss that reaches the parameters, or by "
        "reentrant activation checkpointing (pass use_reentrant=False to "
        "torch.utils.checkpoint.checkpoint)"
    )


def _applied(value: Any) -> Iterator[AppliedGradient]:
    if isinstance(value, AppliedGradient):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _applied(item)
    elif isinstance(value, dict):
        yield from _applied(list(value.values()))
