"""Whoever reads a parameter waits for the step that runs beside the model, and for no more of it.

Every parameter that the step changes is watched: a use of it anywhere, on any thread, waits for
its chunks. Hooks on modules wait earlier, so that what they own is as it always is when they run.
Torch's own modules look at the class of their parameters, and take another path, with other bits,
if that is not an ordinary one. For the same reason a call of another kind than those that were
recorded (another module or thread, evaluation, without gradients) waits for everything first. At
the end of each call everything is waited for.

Compiled code runs no hooks, and a model that is compiled is not watched: everything is waited for
at its entry. And where it is not known what reads the parameters, the step itself waits. So what is
computed does not depend on how far the step has got.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from offload.format.layout import Layout
from offload.model.parameters import Trainable
from offload.model.replacing import is_describing
from offload.model.watch import Watch
from offload.overlap import compiling
from offload.overlap.background_pass import RunningPass
from offload.overlap.forward_order import ForwardOrder

_MAX_RECORDS = 3
"""Steps to record: one more if a parameter gets a gradient that nothing was seen to read."""

_log = logging.getLogger("offload")


class _Calls(threading.local):
    """Which calls of modules one thread is in."""

    def __init__(self) -> None:
        self.step = -1
        """The step since which the rest is so."""
        self.outermost = -1
        """The module whose call contains all others, by number; -1 outside of any call."""
        self.has_gradients = False
        """Whether that call records a graph."""
        self.is_recorded = False
        self.stack: list[int] = []
        """All modules that are running, while calls are recorded."""
        self.is_suspended = False
        """Whether the optimizer itself looks at the model's state dict."""


class ForwardHooks:
    """Knows which module needs which chunks, and in which order.

    Args:
        model: The module that is called.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._key = compiling.follow(self)
        self._watch = Watch(self._before_use, f"awaited by optimizer {self._key}")
        self._handles: list[RemovableHandle] = []
        self._modules: list[torch.nn.Module] = []
        self._record = ForwardOrder()
        self._recording = False
        """Whether calls of the model are being recorded."""
        self._recorded: set[tuple[object, ...]] = set()
        """Kinds of calls that have been."""
        self._has_news = False
        """Whether one has been since the last step."""
        self._num_records = 0
        self._compiled = False
        self._is_read_compiled = False
        """Whether compiled code that is not the model's has been seen to read parameters."""
        self._num_recompiled = 0
        self.order: Sequence[int] = ()
        """All chunks, in the order of their first use."""
        self._layout: Layout | None = None
        self._tensors: list[torch.Tensor] = []
        """What is trained, in element-space order."""
        self._numbers: dict[int, int] = {}
        """By id of a tensor: its place among those."""
        self._spans: list[range] = []
        """By number of a parameter: its chunks."""
        self._needs: list[list[int]] = []
        """By module: what it owns, and what it reads before another one has run that does."""
        self._subtrees: dict[int, list[int]] = {}
        """By module: what it and the modules in it own."""
        self._outside: list[int] = []
        """Parameters that nothing was seen to need."""
        self._changing: list[int] = []
        """Parameters that the next step changes."""
        self._running: RunningPass | None = None
        self._entered = self._root_entered = False
        """Whether anything, and whether the model itself, has been called since the last step."""
        self._num_steps = 0
        self._owner = 0
        """The thread that takes steps."""
        self._calls = _Calls()

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
        self._compiled = any(map(compiling.is_compiled, self._modules))
        self._record = ForwardOrder()
        self._recorded.clear()
        self._recording, self._has_news, self._num_records = True, False, 0
        self._layout = None

    def remove(self) -> None:
        """Take the hooks off; nothing is watched any more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._recording = False
        self._watch.release_all()

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
            self._num_records += 1
        if self._has_news or layout is not self._layout:
            self._lay_out(layout, trainables)
        self._has_news = False
        self._changing = [n for n, gradient in enumerate(gradients) if gradient is not None]
        outside = [number for number in self._outside if gradients[number] is not None]
        self._recording = not self._compiled and (
            self._num_records == 0 or (bool(outside) and self._num_records < _MAX_RECORDS)
        )
        known = self._root_entered if self._compiled else self._entered and self._num_records > 0
        if not known or self._is_read_compiled:
            return list(self.order)
        return [] if self._compiled else [c for number in outside for c in self._spans[number]]

    def begin(self, running: RunningPass) -> list[int]:
        """Wait for this pass from now on; it is to be started afterwards.

        Returns:
            More chunks for the step itself to wait for: parameters in them cannot be watched.
        """
        self._watch.release_all()
        self._owner = threading.get_ident()
        self._num_steps += 1  # a call that was interrupted has not said that it ended
        self._entered = self._root_entered = False
        self._record.start_over()
        self._running = running
        if self._compiled or self._is_read_compiled:
            return []
        compiling.listen()
        stuck = self._watch.add([self._tensors[number] for number in self._changing])
        return [c for tensor in stuck for c in self._spans[self._numbers[id(tensor)]]]

    def wait_for(self, chunks: Sequence[int]) -> None:
        """Wait for what `plan` and `begin` have returned, within the step."""
        running = self._running
        if running is not None:
            running.wait_for(chunks)
            if chunks:
                done = set(chunks)
                self._watch.release(
                    self._tensors[n] for n in self._changing if done.issuperset(self._spans[n])
                )

    def release(self) -> None:
        """There is no pass to wait for any more."""
        self._running = None
        self._watch.release_all()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Do not wait while the optimizer itself looks at the model's state dict."""
        self._calls.is_suspended = True
        try:
            yield
        finally:
            self._calls.is_suspended = False

    def before(self, number: int) -> None:
        """Wait for what a module needs, which is about to run."""
        self._entered = True
        if number == 0:
            self._root_entered = True
        if self._running is None and not self._recording and not self._watch:
            return
        calls = self._calls
        if calls.step != self._num_steps:
            calls.step, calls.outermost = self._num_steps, -1
        try:
            if calls.outermost in (-1, number):  # if interrupted, a call did not say that it ended
                calls.is_recorded = self._enter(number)
                calls.outermost, calls.has_gradients = number, _has_gradients()
                calls.stack.clear()
            elif calls.has_gradients and not _has_gradients():
                self._settle(self._subtree(number), self._modules[number].parameters())
            if calls.is_recorded:
                self._record.ran(_own_parameters(self._modules[number]))
                calls.stack.append(number)
            needs = self._needs[number] if self._layout is not None else []
            self._settle(needs, _own_parameters(self._modules[number]))
        except BaseException:
            calls.outermost = -1
            raise

    def after(self, number: int) -> None:
        """At the end of a call that was not part of another one, wait for everything."""
        calls = self._calls
        if number in calls.stack:
            while calls.stack.pop() != number:
                pass
        if number == calls.outermost and calls.step == self._num_steps:
            calls.outermost = -1
            # An error is not raised amid another one, where nobody would see it.
            self.wait(errors=sys.exc_info()[0] is None)

    def wait(self, *, errors: bool = True) -> None:
        """Wait for all parameters."""
        running = self._running
        if running is not None and not self._calls.is_suspended:
            running.wait_ended()
            self._watch.release_all()
            self._running = None if errors else running
            if errors:
                running.raise_error()

    def wait_unwatched(self) -> None:
        """Wait for all parameters, for somebody who must find them as they always are."""
        self.wait()
        if not self._calls.is_suspended:
            self._watch.release_all()

    @property
    def sees_readers(self) -> bool:
        """Whether whoever reads a parameter waits for it, wherever that is."""
        return not self._compiled

    @property
    def knows_compiled(self) -> bool:
        """Whether everything is waited for at the entry of the model: part of it is compiled."""
        return self._compiled

    def before_compiled(self, number: int) -> None:
        """Wait for everything before compiled code runs, in which there are no hooks."""
        self._know_compiled()
        if number == 0:
            self._root_entered = True
        self.wait_unwatched()

    def compiling_begins(self) -> None:
        """Let what is compiled on the thread that takes steps find ordinary parameters."""
        if threading.get_ident() != self._owner or not self._watch:
            return
        num_recompiled = compiling.num_recompiled(f"{self._watch.label}'>")
        if num_recompiled > self._num_recompiled and not self._is_read_compiled:
            self._is_read_compiled = True
            _log.warning(
                "compiled code that is not the model's own reads its parameters while a step runs "
                'beside the model (overlap="forward"): from now on step() waits for the whole '
                "step. To compile it only once, call synchronize() before it"
            )
        self._num_recompiled = num_recompiled
        self._watch.pause()

    def compiling_ended(self) -> None:
        """Watch again what has not been waited for."""
        if threading.get_ident() == self._owner and self._watch:
            self._watch.resume()

    def _enter(self, number: int) -> bool:
        """Wait for everything if this call is not like those before; return if it is recorded."""
        if not self._compiled and any(map(compiling.is_compiled, self._modules)):
            self._know_compiled()
        kind = (
            number,
            self._modules[number].training,
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            threading.get_ident(),
        )
        records = self._recording and _has_gradients()
        if records or self._compiled or kind not in self._recorded:
            self.wait_unwatched()
        if records:
            self._recorded.add(kind)
            self._has_news = True
            self._owner = threading.get_ident()
            compiling.listen()
            self._watch.add(
                p
                for p in self._model.parameters()
                if p.requires_grad and self._record.turn(p) is None
            )
        return records

    def _know_compiled(self) -> None:
        self._compiled, self._recording = True, False

    def _before_use(self, parameter: torch.Tensor | None) -> bool:
        """Wait for a parameter that is about to be read or changed; None stands for any of them."""
        if compiling.is_compiling_here():
            return False  # it looks at the tensor, not at its values
        running = self._running
        if running is not None and not running.begun and threading.get_ident() == self._owner:
            return False  # a signal handler amid step(): the step has not changed anything yet
        if parameter is None:
            self.wait()
            return True
        if self._recording:
            stack = self._calls.stack if self._calls.step == self._num_steps else []
            self._record.used(parameter, stack[-1] if stack else None)
        if running is not None and id(parameter) in self._numbers:
            running.wait_for(self._spans[self._numbers[id(parameter)]])
        return True

    def _settle(self, numbers: Sequence[int], parameters: Iterable[torch.Tensor]) -> None:
        """Wait for parameters by number, and let them, and others, be as they always are."""
        running = self._running
        if running is not None:
            running.wait_for(c for number in numbers for c in self._spans[number])
        if self._watch:
            self._watch.release(self._tensors[number] for number in numbers)
            self._watch.release(parameters)

    def _subtree(self, number: int) -> list[int]:
        if number not in self._subtrees:
            own = (self._numbers.get(id(p)) for p in self._modules[number].parameters())
            self._subtrees[number] = [n for n in own if n is not None]
        return self._subtrees[number]

    def _lay_out(self, layout: Layout, trainables: Sequence[Trainable]) -> None:
        self._spans = [layout.chunks_of(number) for number in range(len(layout.parameters))]
        self._tensors = [trainable.tensor for trainable in trainables]
        self._numbers = {id(tensor): number for number, tensor in enumerate(self._tensors)}
        readers = self._record.readers(self._numbers)
        self._needs = [
            sorted(
                {self._numbers[id(p)] for p in _own_parameters(module) if id(p) in self._numbers}
                | set(readers.get(number, ()))
            )
            for number, module in enumerate(self._modules)
        ]
        self._subtrees = {}
        first_use = [sys.maxsize] * layout.num_chunks
        self._outside = []
        for number, tensor in enumerate(self._tensors):
            turn = self._record.turn(tensor)
            if turn is None:
                self._outside.append(number)
                continue
            for chunk in self._spans[number]:
                first_use[chunk] = min(first_use[chunk], turn)
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
        if torch.compiler.is_dynamo_compiling():
            compiling.before_traced_module(self._key, self._number)
            return
        owner = self._owner()
        if owner is not None:
            owner.before(self._number)


class _After(_Hook):
    def __call__(self, _module: torch.nn.Module, _args: Any, _result: Any) -> None:
        if not torch.compiler.is_dynamo_compiling():
            owner = self._owner()
            if owner is not None:
                owner.after(self._number)


class _OnStateDict(_Hook):
    def __call__(self, *_: Any) -> None:
        owner = self._owner()
        if owner is not None and not is_describing():
            owner.wait_unwatched()


def _has_gradients() -> bool:
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def _own_parameters(module: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    return (p for p in module._parameters.values() if p is not None)
