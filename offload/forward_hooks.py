"""Hooks that make a model's forward wait for a step that runs beside it, module by module.

Inside a call of the model, or of a part of it, each module waits for its own parameters. What no
module waits for in time is waited for at the entry, and everything at the end of the call. Compiled
code runs no hooks: everything is waited for at the entry of the model. And where it is not known
what reads the parameters, the step itself waits. So what a forward computes does not depend on how
far the step has got.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from offload.forward_order import AT_ENTRY, OUTSIDE, ForwardOrder
from offload.layout import Layout
from offload.parameters import Trainable
from offload.running import RunningPass

_MAX_RECORDS = 3
"""Forwards to record: one more if a parameter gets a gradient that none of them has used."""


class ForwardHooks:
    """Knows which module needs which chunks, and in which order.

    Args:
        model: The module that is called.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._key = next(_keys)
        _by_key[self._key] = self
        self._handles: list[RemovableHandle] = []
        self._modules: list[torch.nn.Module] = []
        self._record = ForwardOrder(())
        self._recording = False
        """Whether calls of the model are being recorded."""
        self._has_news = False
        """Whether one has been since the last step."""
        self._num_records = 0
        self._compiled = False
        self.order: Sequence[int] = ()
        """All chunks, in the order of their first use."""
        self._layout: Layout | None = None
        self._spans: list[range] = []
        """By parameter: its chunks."""
        self._own: list[list[int]] = []
        """By module: the chunks of its own parameters."""
        self._outside: list[int] = []
        """Parameters that no recorded forward has used."""
        self._at_entry: list[int] = []
        """Chunks of those that were used before their own module ran."""
        self._running: RunningPass | None = None
        self._suspended = False
        self._entered = self._root_entered = False
        """Whether anything, and whether the model itself, has been called since the last step."""
        self._outermost = -1
        """The module whose call contains all others, by number; -1 outside of any call."""
        self._depth = 0

    def attach(self) -> None:
        """Put hooks on all modules that the model has now, and record its next forward."""
        self.remove()
        self._modules = list(self._model.modules())
        for number, module in enumerate(self._modules):
            hooked: Any = module  # torch does not say what its hooks are
            state = _OnStateDict(self, self._key, number)
            self._handles += [
                hooked.register_forward_pre_hook(_Before(self, self._key, number), prepend=True),
                hooked.register_forward_hook(_After(self, self._key, number), always_call=True),
                hooked.register_state_dict_pre_hook(state),
                hooked.register_load_state_dict_pre_hook(state),
            ]
        self._compiled = any(map(_is_compiled, self._modules))
        self._record = ForwardOrder(self._model.parameters())
        self._recording, self._has_news, self._num_records = True, False, 0
        self._layout = None

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._record.end()

    def plan(
        self,
        layout: Layout,
        trainables: Sequence[Trainable],
        gradients: Sequence[torch.Tensor | None],
    ) -> list[int]:
        """Set `order` for a step, and return the chunks that the step itself must wait for.

        Args:
            layout: Where the parameters lie.
            trainables: They, in element-space order.
            gradients: What the step applies.
        """
        if self._has_news:
            self._recording, self._num_records = False, self._num_records + 1
        if self._has_news or layout is not self._layout:
            self._lay_out(layout, trainables)
        self._has_news = False
        outside = [number for number in self._outside if gradients[number] is not None]
        self._recording |= bool(outside) and 0 < self._num_records < _MAX_RECORDS
        known = self._root_entered if self._compiled else self._entered and self._num_records > 0
        if not known:
            return list(self.order)
        return [] if self._compiled else [c for number in outside for c in self._spans[number]]

    def begin(self, running: RunningPass) -> None:
        """From now on, wait for this pass."""
        self._running = running
        self._entered = self._root_entered = False
        self._outermost = -1  # a call that was interrupted has not said that it ended
        self._record.end()

    def release(self) -> None:
        """There is no pass to wait for any more."""
        self._running = None

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Do not wait while the optimizer itself looks at the model's state dict."""
        self._suspended = True
        try:
            yield
        finally:
            self._suspended = False

    def before(self, number: int) -> None:
        """Wait for what a module needs, which is about to run."""
        self._entered = True
        if number == 0:
            self._root_entered = True
        running = self._running
        if running is None and not self._recording:
            return
        if self._outermost < 0:
            self._outermost, self._depth = number, 0
            self._enter()
        if number == self._outermost:
            self._depth += 1
        if self._recording:
            self._record.ran(_own_parameters(self._modules[number]))
        if running is not None:
            running.wait_for(self._own[number])

    def after(self, number: int) -> None:
        """At the end of a call that was not part of another one, wait for everything."""
        if number != self._outermost:
            return
        self._depth -= 1
        if self._depth == 0:
            self._outermost = -1
            self._record.end()
            # An error is not raised amid another one, where nobody would see it.
            self.wait(errors=sys.exc_info()[0] is None)

    def wait(self, *, errors: bool = True) -> None:
        """Wait for all parameters."""
        running = self._running
        if running is not None and not self._suspended:
            running.wait_ended()
            self._running = None if errors else running
            if errors:
                running.raise_error()

    @property
    def knows_compiled(self) -> bool:
        """Whether everything is waited for at the entry of the model: part of it is compiled."""
        return self._compiled

    def before_compiled(self, number: int) -> None:
        """Wait for everything before compiled code runs, in which there are no hooks."""
        self._compiled = True
        if number == 0:
            self._root_entered = True
        self.wait()

    def _enter(self) -> None:
        """Wait at the beginning of a call for what modules cannot wait for."""
        self._compiled = self._compiled or any(map(_is_compiled, self._modules))
        self._recording &= not self._compiled
        if self._running is not None:
            if self._recording or self._compiled:
                self.wait()
            else:
                self._running.wait_for(self._at_entry)
        if self._recording:
            self._has_news = True
            self._record.begin()

    def _lay_out(self, layout: Layout, trainables: Sequence[Trainable]) -> None:
        self._spans = [layout.chunks_of(number) for number in range(len(layout.parameters))]
        spans = {id(t.tensor): span for t, span in zip(trainables, self._spans, strict=True)}
        self._own = [
            sorted({c for p in _own_parameters(module) for c in spans.get(id(p), ())})
            for module in self._modules
        ]
        first_use = [sys.maxsize] * layout.num_chunks
        self._outside, self._at_entry = [], []
        for number, trainable in enumerate(trainables):
            use = self._record.rank(trainable.tensor)
            if use == OUTSIDE:
                self._outside.append(number)
            elif use == AT_ENTRY:
                self._at_entry += self._spans[number]
            for chunk in self._spans[number]:
                first_use[chunk] = min(first_use[chunk], use)
        self.order = sorted(range(layout.num_chunks), key=first_use.__getitem__)
        self._layout = layout


class _Hook:
    """One hook on one module. It does not keep its owner alive; a copy of it does nothing."""

    def __init__(self, owner: ForwardHooks, key: int, number: int) -> None:
        self._owner = weakref.ref(owner)
        self._key = key
        self._number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _Inert, ()


class _Inert:
    """What a hook becomes in a copy of the model."""

    def __call__(self, *_: Any) -> None:
        """Do nothing."""


class _Before(_Hook):
    def __call__(self, _module: torch.nn.Module, _args: Any) -> None:
        if torch.compiler.is_compiling():
            if self._number == 0 or not _is_expected(self._key):
                _before_compiled(self._key, self._number)
            return
        owner = self._owner()
        if owner is not None:
            owner.before(self._number)


class _After(_Hook):
    def __call__(self, _module: torch.nn.Module, _args: Any, _result: Any) -> None:
        if not torch.compiler.is_compiling():
            owner = self._owner()
            if owner is not None:
                owner.after(self._number)


class _OnStateDict(_Hook):
    def __call__(self, *_: Any) -> None:
        owner = self._owner()
        if owner is not None:
            owner.wait()


_keys = itertools.count(1)
_by_key: weakref.WeakValueDictionary[int, ForwardHooks] = weakref.WeakValueDictionary()


def _wait_amid_compiled(key: int, number: int) -> None:
    owner = _by_key.get(key)
    if owner is not None:
        owner.before_compiled(number)


def _ask_while_tracing(key: int) -> bool:
    # Must not wait: while a graph is traced, the step waits for the end of that.
    owner = _by_key.get(key)
    return owner is None or owner.knows_compiled


_compiler: Any = torch.compiler  # which is not typed
_before_compiled = _compiler.disable(
    _wait_amid_compiled,
    reason='the model must wait for its parameters here (overlap="forward"). To compile it without '
    "a graph break, construct the optimizer with model=torch.compile(model, fullgraph=True)",
)
_is_expected = _compiler.assume_constant_result(_ask_while_tracing)


def _is_compiled(module: torch.nn.Module) -> bool:
    compiled = getattr(module, "_compiled_call_impl", None) is not None
    return compiled or isinstance(module, torch._dynamo.OptimizedModule)


def _own_parameters(module: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    return (p for p in module._parameters.values() if p is not None)
