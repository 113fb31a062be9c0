"""Gradients that are applied while backward runs: their order, and what stands in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from gds.waiting import Monitor
from offload.errors import OverlapError
from offload.format.layout import Layout
from offload.stream.passes import StatePass
from offload.update.updater import ChunkUpdater

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


class GradientSchedule:
    """Iterable that yields each chunk of a pass as soon as all its gradients are final.

    The order is fixed in advance, since the ring reads ahead. When no more gradients will come, the
    remaining chunks follow, if they have to be stepped or moved.
    """

    def __init__(self, layout: Layout, state_pass: StatePass) -> None:
        self._pass = state_pass
        self._spans = [layout.chunks_of(number) for number in range(len(layout.parameters))]
        self._parameters_of: list[list[int]] = [[] for _ in range(layout.num_chunks)]
        for number, span in enumerate(self._spans):
            for chunk in span:
                self._parameters_of[chunk].append(number)
        self._num_missing = [len(numbers) for numbers in self._parameters_of]
        self._num_left = [len(span) for span in self._spans]
        self._bytes: dict[int, int] = {}
        self._held_bytes = 0
        self.peak_bytes = 0
        """Largest number of bytes of gradients that were held at once."""
        self.ready: list[int] = []
        """Chunks that are ready, in the order in which the last of their gradients came."""
        self._changed = Monitor()
        self._is_complete = False
        self._is_abandoned = False

    def give(self, number: int, gradient: torch.Tensor) -> None:
        """Add the final gradient of a parameter; any thread may call this."""
        with self._changed:
            updater = self._pass.updater
            if not isinstance(updater, ChunkUpdater):
                raise TypeError(f"a pass of gradients is a step, not a {type(updater).__name__}")
            updater.set_gradient(number, gradient)
            if self._num_left[number]:
                self._bytes[number] = gradient.nbytes
                self._held_bytes += gradient.nbytes
                self.peak_bytes = max(self.peak_bytes, self._held_bytes)
            for chunk in self._spans[number]:
                self._num_missing[chunk] -= 1
                if self._num_missing[chunk] == 0:
                    self.ready.append(chunk)
            self._changed.notify_all()

    def complete(self) -> None:
        """Note that no more gradients will come."""
        with self._changed:
            self._is_complete = True
            self._changed.notify_all()

    def abandon(self) -> None:
        """Make the pass fail instead of waiting for more gradients."""
        with self._changed:
            self._is_abandoned = True
            self._changed.notify_all()

    def order(self) -> list[int]:
        """Return all chunks, in the order in which their gradients came in this pass."""
        seen = set(self.ready)
        return self.ready + [c for c in self._pass.chunks if c not in seen]

    def __iter__(self) -> Iterator[int]:
        chunks: Sequence[int] = self._pass.chunks
        num_taken = 0
        while num_taken < len(chunks) and self._wait_for(chunks[num_taken]):
            yield chunks[num_taken]
            self._applied(chunks[num_taken])
            num_taken += 1
        rest = [c for c in chunks[num_taken:] if self._pass.is_needed(c)]
        self._pass.announce(rest)
        for chunk in rest:
            yield chunk
            self._applied(chunk)

    def _wait_for(self, chunk: int) -> bool:
        """Wait until all gradients of a chunk are final, or no more will come."""
        self._changed.wait_until(
            lambda: not self._num_missing[chunk] or self._is_complete or self._is_abandoned
        )
        if self._is_abandoned:
            raise OverlapError("backward() had applied some of its gradients, not all")
        return self._num_missing[chunk] == 0

    def _applied(self, chunk: int) -> None:
        with self._changed:
            for number in self._parameters_of[chunk]:
                self._num_left[number] -= 1
                if self._num_left[number] == 0:
                    self._held_bytes -= self._bytes.pop(number, 0)
