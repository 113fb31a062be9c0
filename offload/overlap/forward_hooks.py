"""Hooks that make readers of a parameter wait for its chunks in the step beside the model.

Any use through torch of a parameter that the step changes waits for its chunks. A watched parameter
has another class, with which torch's own modules take a code path with other last bits. So hooks
wait earlier, before a module runs, and a call of a kind that was not recorded, a compiled model, or
the step itself if readers cannot be observed, wait for all parameters. Results never depend on the
progress of the step.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Collection, Iterator, Sequence
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
from offload.overlap.forward_plan import (
    ForwardOrder,
    ForwardPlan,
    begins_lazily,
    make_plan,
    needed_by,
    put_first,
)

_MAX_RECORDS = 3
"""Largest number of recorded steps. A step after the first is recorded if a parameter gets a
gradient although no reader of the parameter was observed."""

_log = logging.getLogger("offload")


class _Calls(threading.local):
    """The calls of modules that a thread is in."""

    def __init__(self) -> None:
        self.step = -1
        """Count of steps when the other attributes were set. At any other count they are stale."""
        self.outermost = -1
        """Number of the module whose call contains all others; -1 outside of any call."""
        self.has_gradients = False
        """Whether the outermost call records a graph."""
        self.is_recorded = False
        """Whether the outermost call is recorded in the order of modules."""
        self.stack: list[int] = []
        """Numbers of all modules that are running, while calls are recorded."""
        self.is_suspended = False
        """Whether the optimizer itself reads the model's state dict, without waiting."""


class ForwardHooks(compiling.Follower):
    """Hooks on a model that know the chunks each module needs, and the order of first use."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._key = compiling.follow(self)
        self._watch = Watch(self._before_use, f"awaited by optimizer {self._key}")
        self._handles: list[RemovableHandle] = []
        self._first: list[tuple[torch.nn.Module, int]] = []
        """Modules, with the ids of the hooks that wait before FSDP2 gathers."""
        self._is_in_order = False
        """Whether the place of these hooks has been checked since the last step."""
        self._modules: list[torch.nn.Module] = []
        self._record = ForwardOrder()
        self._recording = False
        """Whether calls of the model are being recorded."""
        self._recorded: set[tuple[object, ...]] = set()
        """Kinds of calls that have been recorded."""
        self._has_new_record = False
        """Whether a call has been recorded since the last step."""
        self._num_records = 0
        self._compiled = False
        self._is_read_by_compiled = False
        """Whether compiled code outside the model was observed to read parameters."""
        self._num_recompiled = 0
        self._layout: Layout | None = None
        """Layout that the plan was made for; None if the plan is out of date."""
        self._plan = ForwardPlan()
        self._elsewhere: list[int] = []
        """Ids of the plan's parameters that only other ranks step."""
        self._subtrees: dict[int, list[int]] = {}
        """Numbers of the parameters that a module and its submodules own, by number of the
        module."""
        self._changing: list[int] = []
        """Numbers of parameters that the next step changes."""
        self._running: RunningPass | None = None
        self._entered = self._root_entered = False
        """Whether any module, and whether the model itself, was called since the last step."""
        self._num_steps = 0
        self._owner = 0
        """Id of the thread that takes steps."""
        self._calls = _Calls()

    def attach(self) -> None:
        """Put hooks on all modules that the model has now, and record its next forward."""
        self.remove()
        self._modules = list(self._model.modules())
        for number, module in enumerate(self._modules):
            hooked: Any = module  # torch does not type its hooks
            state = compiling.Hook(self, ForwardHooks.on_state_dict)
            after = compiling.ModuleHook(self, ForwardHooks.after_module, number)
            before = hooked.register_forward_pre_hook(
                _Before(self, self._key, number), prepend=True
            )
            self._first.append((module, before.id))
            self._handles += [
                before,
                hooked.register_forward_hook(after, always_call=True),
                hooked.register_state_dict_pre_hook(state),
                hooked.register_load_state_dict_pre_hook(state),
            ]
        self._compiled = any(map(compiling.is_compiled, self._modules))
        self._record = ForwardOrder()
        self._recorded.clear()
        self._recording, self._has_new_record, self._num_records = True, False, 0
        self._layout = None

    def remove(self) -> None:
        """Remove the hooks, and stop watching parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._first.clear()
        self._recording = False
        self._watch.release_all()

    @property
    def order(self) -> Sequence[int]:
        """All chunks, in the order of their first use."""
        return self._plan.order

    def plan(
        self,
        layout: Layout,
        trainables: Sequence[Trainable],
        gradients: Sequence[torch.Tensor | None],
        elsewhere: Sequence[tuple[str, torch.Tensor]] = (),
    ) -> list[int]:
        """Set `order` for a step, and return what the step itself must wait for by `wait_for`.

        Parameters of `elsewhere`, which only other ranks step, have their gradients still.
        """
        if self._has_new_record:
            self._num_records += 1
        ids = [id(parameter) for _, parameter in elsewhere]
        if self._has_new_record or layout is not self._layout or ids != self._elsewhere:
            self._plan = make_plan(layout, trainables, self._modules, self._record, elsewhere)
            self._layout, self._elsewhere, self._subtrees = layout, ids, {}
        self._has_new_record = False
        changes = [gradient is not None for gradient in gradients]
        changes += [parameter.grad is not None for _, parameter in elsewhere]
        self._changing = [number for number, is_changed in enumerate(changes) if is_changed]
        unobserved = [number for number in self._plan.unobserved if changes[number]]
        self._recording = not self._compiled and (
            self._num_records == 0 or (bool(unobserved) and self._num_records < _MAX_RECORDS)
        )
        known = self._root_entered if self._compiled else self._entered and self._num_records > 0
        if not known or self._is_read_by_compiled:
            return [*range(len(changes))]
        return [] if self._compiled else unobserved

    def begin(self, running: RunningPass) -> list[int]:
        """Make readers wait for this pass from now on. Call this before the pass is started."""
        self._watch.release_all()
        self._owner = threading.get_ident()
        self._num_steps += 1  # makes the `_Calls` of an interrupted call stale
        self._entered = self._root_entered = self._is_in_order = False
        self._record.start_over()
        self._running = running
        if self._compiled or self._is_read_by_compiled:
            return []
        compiling.listen()
        stuck = self._watch.add([self._plan.tensors[number] for number in self._changing])
        return [self._plan.numbers[id(tensor)] for tensor in stuck]

    def wait_for(self, numbers: Sequence[int]) -> None:
        """Wait, within the step, for the parameters that `plan` and `begin` have returned."""
        if self._running is not None:
            self._await(self._running, numbers)
            done = set(numbers).intersection(self._changing)
            self._watch.release(self._plan.tensors[number] for number in done)

    def release(self) -> None:
        """Note that there is no pass to wait for any more."""
        self._running = None
        self._watch.release_all()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Do not wait in this block, in which the optimizer itself reads the model's state dict."""
        self._calls.is_suspended = True
        try:
            yield
        finally:
            self._calls.is_suspended = False

    def before_module(self, number: int) -> None:
        """Wait for the parameters that a module needs, before the module runs."""
        self._entered = True
        if number == 0:
            self._root_entered = True
        if self._running is None and not self._recording and not self._watch:
            return
        calls = self._calls
        if calls.step != self._num_steps:
            calls.step, calls.outermost = self._num_steps, -1
        try:
            if not self._is_in_order:
                put_first(self._first)
                self._is_in_order = True
            # A call that was interrupted did not reset `outermost`.
            if calls.outermost in (-1, number):
                calls.is_recorded = self._begin_outermost(number)
                calls.outermost, calls.has_gradients = number, _has_gradients()
                calls.stack.clear()
            elif calls.has_gradients and not _has_gradients():
                self._wait_and_release(
                    self._subtree(number), list(self._modules[number].parameters())
                )
            needed = list(needed_by(self._modules[number]))
            if calls.is_recorded:
                self._record.ran(needed)
                calls.stack.append(number)
            needs = self._plan.needs[number] if self._layout is not None else []
            self._wait_and_release(needs, needed)
        except BaseException:
            calls.outermost = -1
            raise

    def after_module(self, number: int, *_: object) -> None:
        """Note the end of a module's call; after an outermost call, wait for all parameters."""
        calls = self._calls
        if number in calls.stack:
            while calls.stack.pop() != number:
                pass
        if number == calls.outermost and calls.step == self._num_steps:
            calls.outermost = -1
            # If the call itself has failed, the error of the step is left for a later call.
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

    def on_state_dict(self, *_: object) -> None:
        """Wait before the user reads or loads the model's state dict."""
        if not is_describing():
            self.wait_unwatched()

    def wait_unwatched(self) -> None:
        """Wait for all parameters, and give them back their ordinary classes."""
        self.wait()
        if not self._calls.is_suspended:
            self._watch.release_all()

    @property
    def sees_readers(self) -> bool:
        """Whether every use of a parameter through torch is observed, and waits for it."""
        return not self._compiled

    @property
    def is_partly_compiled(self) -> bool:
        """Whether part of the model is compiled, so that its calls wait for all parameters."""
        return self._compiled

    def before_compiled(self, number: int) -> None:
        """Wait for all parameters before compiled code runs, since it runs no hooks."""
        self._note_compiled()
        if number == 0:
            self._root_entered = True
        self.wait_unwatched()

    def compiling_begins(self) -> None:
        """Pause the watch, so that a compiler on the thread of steps finds ordinary classes."""
        if threading.get_ident() != self._owner or not self._watch:
            return
        num_recompiled = compiling.num_recompiled(f"{self._watch.label}'>")
        if num_recompiled > self._num_recompiled and not self._is_read_by_compiled:
            self._is_read_by_compiled = True
            _log.warning(
                "compiled code that is not the model's own reads its parameters while a step runs "
                'beside the model (overlap="forward"): from now on step() waits for the whole '
                "step. To compile it only once, call synchronize() before it"
            )
        self._num_recompiled = num_recompiled
        self._watch.pause()

    def compiling_ended(self) -> None:
        """Resume the watch on parameters that have not been waited for."""
        if threading.get_ident() == self._owner and self._watch:
            self._watch.resume()

    def _begin_outermost(self, number: int) -> bool:
        """Begin an outermost call; if its kind is new, wait for all parameters."""
        if not self._compiled and any(map(compiling.is_compiled, self._modules)):
            self._note_compiled()
        kind = (
            number,
            self._modules[number].training,
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            threading.get_ident(),
        )
        records = self._recording and _has_gradients() and not begins_lazily(self._modules[number])
        if records or self._compiled or kind not in self._recorded:
            self.wait_unwatched()
        if records:
            self._recorded.add(kind)
            self._has_new_record = True
            self._owner = threading.get_ident()
            compiling.listen()
            self._watch.add(
                p
                for p in self._model.parameters()
                if p.requires_grad and self._record.first_use(p) is None
            )
        return records

    def _note_compiled(self) -> None:
        self._compiled, self._recording = True, False

    def _before_use(self, parameter: torch.Tensor | None) -> bool:
        """Wait for a parameter that is about to be used; None means that any may be used."""
        if compiling.is_compiling_here():
            return False  # the compiler looks at the tensor, not at its values
        running = self._running
        if running is not None and not running.begun and threading.get_ident() == self._owner:
            return False  # a signal handler interrupted step(), which has not changed anything yet
        if parameter is None:
            self.wait()
            return True
        if self._recording:
            stack = self._calls.stack if self._calls.step == self._num_steps else []
            self._record.used(parameter, stack[-1] if stack else None)
        if running is not None and id(parameter) in self._plan.numbers:
            self._await(running, [self._plan.numbers[id(parameter)]])
        return True

    def _await(self, running: RunningPass, numbers: Collection[int]) -> None:
        """Wait for parameters by number."""
        plan = self._plan
        chunks = (chunk for number in numbers for chunk in plan.spans[number])
        running.wait_for(chunks, (plan.names[number] for number in numbers))

    def _wait_and_release(
        self, numbers: Sequence[int], parameters: Sequence[torch.Tensor] = ()
    ) -> None:
        """Wait for parameters, and stop watching them."""
        running, plan = self._running, self._plan
        if running is not None:
            also = (plan.numbers.get(id(p)) for p in parameters)
            self._await(running, {*numbers, *(number for number in also if number is not None)})
        if self._watch:
            self._watch.release(plan.tensors[number] for number in numbers)
            self._watch.release(parameters)

    def _subtree(self, number: int) -> list[int]:
        if number not in self._subtrees:
            below = (p for m in self._modules[number].modules() for p in needed_by(m))
            own = (self._plan.numbers.get(id(p)) for p in below)
            self._subtrees[number] = sorted({n for n in own if n is not None})
        return self._subtrees[number]


class _Before(compiling.Hook):
    """The hook before a module, which compiled code runs in another form."""

    def __init__(self, owner: ForwardHooks, key: int, number: int) -> None:
        super().__init__(owner, ForwardHooks.before_module, number)
        self._key = key
        self._number = number

    def __call__(self, *_: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            compiling.before_traced_module(self._key, self._number)
        else:
            super().__call__()


def _has_gradients() -> bool:
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
