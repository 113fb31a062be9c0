"""Strategy that steps chunks while backward computes the next gradients (``overlap="backward"``).

The first gradient after a step opens a pass. A hook on each parameter hands over its gradient as
soon as that is final, and leaves an `AppliedGradient` in its place. While a pass is open, the state
is half stepped: only `step` and `restore` are possible, and any use of a parameter whose gradient
has been taken is refused. `BackwardHooks` tells which backwards are no steps and open no pass.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from offload.ambient import neutral
from offload.engine.stepping import (
    StepStrategy,
    advance,
    advanced,
    begin_pass,
    pass_ended,
    pass_failed,
    step_chunks,
)
from offload.engine.training_state import Groups, TrainingState
from offload.errors import OverlapError
from offload.model.parameters import check_gradients
from offload.model.watch import Watch
from offload.overlap import compiling
from offload.overlap.background_pass import RunningPass
from offload.overlap.backward_gradients import (
    REMEDY,
    AppliedGradient,
    GradientSchedule,
    second_backward_message,
)
from offload.overlap.backward_hooks import BackwardHooks
from offload.overlap.constant_uses import backward_id
from offload.stream.passes import StatePass
from offload.update.kept_state import Scalars


class DuringBackward(StepStrategy):
    """The strategy of steps that overlap with the backward before them."""

    def __init__(self, state: TrainingState, model: torch.nn.Module) -> None:
        if state.table.shards is not None:
            raise OverlapError(
                'overlap="backward" steps each parameter with the gradient of this rank alone, '
                "before the ranks have averaged theirs: use "
                'Options(overlap="forward"), or None'
            )
        super().__init__(state)
        # While any thread compiles a graph, torch's optimizers compute in another way, with results
        # that differ in the last bit.
        state.update_lock = compiling.compile_lock
        state.is_backwards = True
        self._hooks = BackwardHooks(self, model)
        self._groups: Callable[[], Groups | None] = lambda: None
        self._handles: dict[int, RemovableHandle] = {}
        """Handle of the hook that takes a parameter's gradient, by id of the parameter."""
        self._hooked: dict[int, torch.Tensor] = {}
        self._stepped = Watch(partial(_refuse_use, weakref.ref(self)), "stepped in backward")
        """Watch on the parameters whose gradients the open pass has taken."""
        self._is_opening = False
        self._hand_over_lock = threading.RLock()
        """Lock held while a gradient is handed over: autograd has a thread for each device."""
        self._running: RunningPass | None = None
        self._schedule: GradientSchedule | None = None
        self._numbers: dict[int, int] = {}
        """Number of each parameter that the open pass may step, by id of the parameter."""
        self._taken: dict[int, AppliedGradient] = {}
        """Placeholder for a parameter's gradient until the step, by number of the parameter."""
        self._opened_by: set[int] = set()
        """Numbers of the backward that opened the pass, and of the backward around it, if any."""

    def attach(self, groups: Callable[[], Groups | None]) -> None:
        """Put hooks on the parameters, and on the model's modules."""
        self._groups = groups
        self._hooks.attach()
        self._hook_parameters(groups() or ())

    def settle(self, call: str) -> None:
        """Raise `OverlapError` if a pass is open, since the state is then half stepped."""
        if self._is_opening or self._running is not None:
            raise OverlapError(
                f"{call} was called between backward() and step(), when the parameters are half "
                f'stepped (overlap="backward"): call step() first, or {REMEDY}. After an error in '
                "backward() call restore()"
            )

    def require_closures(self) -> None:
        """Raise `OverlapError`: `step` runs a closure, but this engine steps before `step`."""
        raise OverlapError(
            'step(closure) is not possible with overlap="backward", which steps while gradients '
            f"are computed: call backward() and then step(), or {REMEDY}"
        )

    def require_unscaled(self) -> None:
        """Abandon an open pass, and raise `OverlapError`: it has applied scaled gradients."""
        if self._running is not None:
            raise self._abandon_because(
                "GradScaler.step() found that scaled gradients had been applied"
            )

    def step(self, groups: Groups) -> None:
        """Step all parameters that the open pass has not stepped, and wait for the pass.

        Raises:
            OverlapError: A gradient was cleared or replaced after it had been applied.
        """
        running, schedule = self._running, self._schedule
        if running is None or schedule is None:
            super().step(groups)
            self._drop_gradients(groups)
            self._hook_parameters(groups)
            self._hooks.step_ended()
            return
        with self._state.meter.timed("step_s"):
            for number, gradient in self._taken.items():
                parameter = self._state.table.trainables[number].parameter
                if parameter.grad is not gradient or gradient.cleared:
                    raise self._abandon_because(
                        f"the gradient of {gradient.parameter_name!r} was cleared or replaced "
                        "between backward() and step(), after it had been applied"
                    )
            for number, found in enumerate(self._state.table.gradients(groups)):
                if found is not None and number not in self._taken:
                    self._take(schedule, number, found)  # the gradient did not come from backward()
            changes, _ = advanced(self._state, groups)
            schedule.complete()
            self._finish()
            self._step_others(groups)
            advance(groups, changes)
            self._state.meter.steps += 1
            self._state.num_steps += 1
        self._hook_parameters(groups)
        self._hooks.step_ended()

    def _step_others(self, groups: Groups) -> None:
        """Step parameters that are not in the pass, such as frozen ones that have got gradients."""
        if self._state.table.is_current(groups):
            return
        self._state.relayout(groups)
        gradients = self._state.table.gradients(groups)
        if any(gradient is not None for gradient in gradients):
            step_chunks(self._state, groups, gradients)
            self._drop_gradients(groups)

    def give_up(self) -> None:
        """Make an open pass fail, and close it. The state is torn afterwards."""
        self._abandon()

    def restored(self, *, found: bool = True) -> None:  # noqa: ARG002
        """Drop placeholders of gradients, and examine the next forward like the first."""
        self._drop_applied()
        self._hooks.watch_again()

    def added(self, groups: Groups) -> None:
        """Put hooks on the new parameters."""
        self._hook_parameters(groups)

    def end(self) -> None:
        """Abandon an open pass, and remove all hooks."""
        self._abandon()
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self._hooks.remove()

    def gradient_ready(self, parameter: torch.Tensor) -> None:
        """Take the gradient of a parameter; called by autograd when it has been computed."""
        with self._hand_over_lock:
            self._hand_over(parameter)

    def _hand_over(self, parameter: torch.Tensor) -> None:
        groups = self._groups()
        if groups is None or self._state.lifecycle.closed or parameter.grad is None:
            return
        self._hooks.gradients_begin()
        if not self._is_last_hook(parameter):
            return  # later hooks of the user need the gradient, so step() takes it
        if self._running is None:
            if self._hooks.holds:
                return
            with neutral(keep_denormals=True):
                self._open(groups)
        running, schedule = self._running, self._schedule
        number = self._numbers.get(id(parameter))
        if running is None or schedule is None or number is None:
            return  # the parameter has left all groups, or joins with the next step
        if running.ended:
            self._finish()
        if number in self._taken:
            raise self._abandon_because(second_backward_message(self._taken[number].parameter_name))
        gradient = parameter.grad.detach()
        self._stepped.add([parameter])  # before its chunk is stepped, which may be at once
        self._take(schedule, number, gradient)

    def refuse_use(self, parameter: torch.Tensor | None) -> bool:
        """Refuse a use of a parameter whose gradient has been taken.

        A use within backward also abandons the pass, since that backward cannot be completed.
        """
        if self._running is None:
            return True
        if compiling.is_compiling_here():
            return False
        number = self._numbers.get(id(parameter))
        name = "" if number is None else f" {self._state.table.trainables[number].spec.name!r}"
        if backward_id() == -1:
            raise OverlapError(
                f"the parameter{name} was used between backward() and step(), when it may have "
                'been stepped already (overlap="backward"), so its value before the step can be '
                "neither read nor edited. Use it before backward() or after step(). After an "
                f"error in backward() call restore(). Otherwise, {REMEDY}"
            )
        with self._hand_over_lock:
            self._hooks.needed_in_backward()
            raise self._abandon_because(
                f"the parameter{name} was used within backward() after its gradient had been "
                "applied: by a hook, a function of autograd, or the recomputation of activation "
                "checkpointing. After restore() each backward() is applied at step()"
            )

    def is_first_backward(self) -> bool:
        """Refuse the backward that is beginning, if another backward has opened a pass.

        Without this check torch would complain that a variable "has been modified by an inplace
        operation".
        """
        if self._running is None:
            return True
        if self._taken and not self._opened_by & self._hooks.backward_ids:
            raise self._abandon_because(
                second_backward_message(next(iter(self._taken.values())).parameter_name)
            )
        return False

    def is_trained(self, tensor: torch.Tensor) -> bool:
        """Return whether this engine steps a tensor, as one of its parameters."""
        return id(tensor) in self._hooked

    def trained(self) -> Iterable[torch.Tensor]:
        """Return the parameters that this engine steps."""
        return self._hooked.values()

    def _open(self, groups: Groups) -> None:
        """Open a pass, whose gradients come later."""
        state = self._state
        self._is_opening = True
        try:
            state.lifecycle.require_usable()
            state.collect_seal()
            state.lay_out_step(groups)
            trainables = state.table.trainables
            state_pass = begin_pass(state, groups, [None] * len(trainables))
            state_pass.chunks = state.chunks()
            state_pass.schedule = schedule = GradientSchedule(state.layout, state_pass)
            failed = partial(pass_failed, state)
            running = RunningPass(state_pass, self._pass_ended, failed, state.meter)
            present = {id(p) for group in groups for p in group["params"]}
            self._numbers = {
                id(t.parameter): n for n, t in enumerate(trainables) if id(t.parameter) in present
            }
            self._taken = {}
            self._opened_by = self._hooks.backward_ids
            self._running, self._schedule = running, schedule
            try:
                running.start(daemon=True)  # an incomplete step need not outlive the program
            except BaseException as error:
                if running.cancel():
                    self._running = self._schedule = None
                    pass_failed(state, state_pass, error)
                raise
        finally:
            self._is_opening = False

    def _finish(self) -> None:
        """Close the pass, which gets no more gradients: wait for it, and raise its error."""
        running, schedule = self._running, self._schedule
        if running is not None and schedule is not None:
            running.join()
            held = max(self._state.meter.moved_gradient_bytes, schedule.peak_bytes)
            self._state.meter.moved_gradient_bytes = held
            self._running = self._schedule = None
            self._stepped.release_all()
            self._drop_applied()
            running.raise_error()

    def _abandon(self) -> None:
        """Make an open pass fail, and close it. The state is torn afterwards."""
        if self._running is not None and self._schedule is not None:
            self._schedule.abandon()
            self._running.join()
            self._running = self._schedule = None
            self._stepped.release_all()

    def _abandon_because(self, reason: str) -> OverlapError:
        """Abandon the pass, mark the state as broken, and return the error with the reason."""
        self._abandon()
        self._state.lifecycle.broken = reason
        return OverlapError(
            f'{reason} (overlap="backward"), so the state is half stepped: '
            f"{self._state.lifecycle.remedy()}. To do this, {REMEDY}"
        )

    def _take(self, schedule: GradientSchedule, number: int, gradient: torch.Tensor) -> None:
        """Move a gradient from its parameter to the pass."""
        trainable = self._state.table.trainables[number]
        check_gradients([trainable], [gradient])
        stand_in = AppliedGradient(gradient, trainable.spec.name, self._abandon_because)
        self._taken[number] = trainable.parameter.grad = stand_in
        schedule.give(number, gradient)

    def _drop_gradients(self, groups: Groups) -> None:
        """Clear the gradients of parameters in groups. The user owns those of other parameters."""
        for group in groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _drop_applied(self) -> None:
        for trainable in self._state.table.trainables:
            if isinstance(trainable.parameter.grad, AppliedGradient):
                trainable.parameter.grad = None

    def _hook_parameters(self, groups: Groups) -> None:
        """Put a hook on each parameter that has none, and move hooks behind those of the user."""
        has_new = False
        for group in groups:
            for parameter in group["params"]:
                if not parameter.requires_grad:
                    continue
                if id(parameter) not in self._hooked:
                    self._hooked[id(parameter)] = parameter
                    has_new = True
                    handle = parameter.register_post_accumulate_grad_hook(
                        compiling.Hook(self, DuringBackward.gradient_ready)
                    )
                    self._handles[id(parameter)] = handle
                elif not self._is_last_hook(parameter):
                    hooks, key = parameter._post_accumulate_grad_hooks, self._handles[id(parameter)]
                    if key.id in hooks:
                        hooks[key.id] = hooks.pop(key.id)
        if has_new:
            self._hooks.watch_again()

    def _is_last_hook(self, parameter: torch.Tensor) -> bool:
        """Return whether this engine's hook on a parameter is called after all others."""
        hooks: Any = parameter._post_accumulate_grad_hooks
        return not hooks or next(reversed(hooks)) == self._handles[id(parameter)].id

    def _pass_ended(self, state_pass: StatePass, scalars: list[Scalars | None]) -> None:
        if isinstance(state_pass.schedule, GradientSchedule):
            self._state.learned_order = state_pass.schedule.order()
        pass_ended(self._state, state_pass, scalars)


def _refuse_use(strategy: weakref.ref[DuringBackward], parameter: torch.Tensor | None) -> bool:
    """Refuse a use of a stepped parameter, as long as the strategy exists."""
    found = strategy()
    return found is None or found.refuse_use(parameter)
