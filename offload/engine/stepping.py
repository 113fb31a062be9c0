"""Steps: how a pass over the state is prepared, run and recorded, and when that is done.

The functions are what every strategy is made of. A pass that fails half way leaves the state
broken, after which only a restore can continue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch

from offload.checkpoint.recut.source import RecutSource
from offload.device.filed import FiledTensor
from offload.engine.seal_handle import SealHandle
from offload.engine.training_state import Groups, TrainingState
from offload.errors import DamagedError
from offload.format.layout import Layout
from offload.gradients import values_for_step
from offload.model.homes import home_of, stays_filed
from offload.model.new_values import Step, Values
from offload.model.parameters import Trainable, memories
from offload.model.watch import announce_uses
from offload.store.state_store import StateSource, try_to_quarantine
from offload.stream.passes import ChunkWork, StatePass
from offload.stream.streamer import Streamer
from offload.update.kept_state import Scalars
from offload.update.step_keys import StepInputs
from offload.update.updater import ChunkUpdater, DeviceUpdater, HostUpdater

STEP_THREAD = "offload-step"
"""Name of the threads that run a pass beside the model."""

Metrics: TypeAlias = Mapping[str, float] | None
"""Checked metrics of a checkpoint. None means that none were given, so that an existing checkpoint
keeps its metrics."""


class StepStrategy:
    """Way in which an engine takes its steps. With this one, a step has ended when `step` returns.

    A strategy works on the engine's `TrainingState` and does not know the engine. If steps run
    beside the model, in a subclass, the state is not at rest while a step is in progress. The
    engine therefore calls `settle` or `give_up` before it does anything else with the state.
    """

    def __init__(self, state: TrainingState) -> None:
        self._state = state

    def attach(self, groups: Callable[[], Groups | None]) -> None:
        """Begin to follow the model if steps run beside it.

        Args:
            groups: Returns ``param_groups``, or None if the optimizer is gone.
        """

    def require_closures(self) -> None:
        """Raise `OverlapError` if a step cannot evaluate the model itself."""

    def require_unscaled(self) -> None:
        """Raise `OverlapError` if it is too late to unscale gradients or to skip the step."""

    def step(self, groups: Groups) -> None:
        """Update every parameter that has a gradient, or begin to update them.

        Raises:
            NotRestoredError: The store has checkpoints; call `restore` or pass fresh=True first.
            SealError: The seal before this step failed. The step has not been taken.
            BrokenOptimizerError: An earlier step failed half way.
        """
        state = self._state
        state.require_step()
        with state.meter.timed("step_s"):
            gradients, _ = state.begin_step(groups)
            changes, has_gradient = advanced(state, groups)
            if has_gradient:
                step_chunks(state, groups, gradients)
                state.meter.steps += 1
            advance(groups, changes)
            state.num_steps += 1

    def before_hooks(self) -> None:
        """Wait at the end of a step if the user's hooks could read parameters unnoticed."""

    def settle(self, call: str) -> None:
        """Bring the state to rest, for a call of the user.

        Args:
            call: Name of the call, for messages.

        Raises:
            OverlapError: The state is half stepped, and stays so until the user calls `step`.
            BaseException: The step in progress failed, and its error has not been raised before.
        """

    def seal_at_end(
        self,
        groups: Groups,  # noqa: ARG002
        train_state: object,  # noqa: ARG002
        metrics: Metrics,  # noqa: ARG002
    ) -> SealHandle | None:
        """Begin a checkpoint that is made when the step in progress ends.

        Returns None if the state is at rest, so that the engine makes the checkpoint.
        """
        self.settle("checkpoint()")
        return None

    def give_up(self) -> None:
        """Bring the state to rest for a restore, even if the step in progress fails."""

    def restored(self, *, found: bool = True) -> None:
        """Record that a restore has ended, with the state of a checkpoint if one was found."""

    def keep_parameters(self) -> None:
        """Prepare for a checkpoint that becomes the present state without its parameters."""

    def kept_parameters(self) -> None:
        """Record that such a checkpoint is the present state."""

    def laid_out(self) -> None:
        """Record that the layout of the state has changed."""

    def added(self, groups: Groups) -> None:
        """Record that the user has added a parameter group."""

    def end(self) -> None:
        """Wait for the step in progress, or give it up, and stop following the model.

        If this method is interrupted, it can be called again.
        """

    def raise_pending(self) -> None:
        """Raise an error that a step, or a checkpoint at its end, has left unraised."""


def step_chunks(
    state: TrainingState, groups: Groups, gradients: Sequence[torch.Tensor | None]
) -> None:
    """Read, update and write every chunk that needs it, or all chunks if the state moves.

    Raises the errors of `StatePass.run`. The state is broken after an error.
    """
    state_pass = begin_pass(state, groups, gradients)
    run_pass(state, state_pass, begin_values(state, groups, state_pass))


def advanced(state: TrainingState, groups: Groups) -> tuple[list[dict[str, Any]], bool]:
    """Return the hyper-parameters that the optimizer's class itself changes in a step.

    It is called while parameters have their gradients. `advance` writes the result into
    ``param_groups`` once the pass has taken the hyper-parameters before the step. The second
    result is whether any parameter has a gradient, on this rank or elsewhere.
    """
    have = [any(p.grad is not None for p in group["params"]) for group in groups]
    advance_group = state.rule.advance
    changes = [
        advance_group(group, has_gradient=has) for group, has in zip(groups, have, strict=True)
    ]
    return changes, any(have)


def advance(groups: Groups, changes: Sequence[dict[str, Any]]) -> None:
    """Write what the optimizer's class itself changes in a step into ``param_groups``."""
    for group, changed in zip(groups, changes, strict=True):
        group.update(changed)


def move_state(state: TrainingState, groups: Groups) -> None:
    """Copy the state from a checkpoint's slot to a working slot, without a step.

    Raises the errors of `StatePass.run`. The state is broken after an error.
    """
    nothing = [None] * len(state.table.trainables)
    run_pass(state, begin_pass(state, groups, nothing, is_step=False))


def begin_values(state: TrainingState, groups: Groups, state_pass: StatePass) -> Values | None:
    """Agree with the other ranks on a step, before anything is changed.

    Returns the exchange of new values with them during the pass; None if there is none.
    """
    try:
        if not state.ranks.gathers:
            state.ranks.require_same_calls()
            return None
        seal, named = state.seal, state.table.live(groups)
        return state.ranks.begin_step(
            Step(
                number=state_pass.step,
                layout=state.layout,
                stepped=state.table.with_gradient(groups),
                chunks=state_pass.chunks,
                memory=named.__getitem__,
                before_write=seal.wait_copied_of if seal is not None else _no_wait,
            )
        )
    except BaseException:
        state.slots.torn(state_pass.target)  # the slot is kept for the next pass
        raise


def _no_wait(name: str) -> None:
    """Return at once: no seal copies the tensor."""
    del name


def run_pass(state: TrainingState, state_pass: StatePass, values: Values | None = None) -> None:
    """Run a pass on the calling thread, and record its success or failure."""
    try:
        try:
            scalars = state_pass.run(None if values is None else values.updated)
        except BaseException as error:
            failure = error if values is None else values.fail(error)
            if failure is error:
                raise
            raise failure from error
        if values is not None:
            values.finish()
        pass_ended(state, state_pass, scalars)
    except BaseException as error:
        state.ranks.failed(error)
        failure = pass_failed(state, state_pass, error)
        if failure is error:
            raise
        raise failure from error


def begin_pass(
    state: TrainingState,
    groups: Groups,
    gradients: Sequence[torch.Tensor | None],
    *,
    is_step: bool = True,
) -> StatePass:
    """Prepare a step over every chunk that needs it, or over all chunks if the state moves."""
    try:
        ring = state.ring()  # an error in allocating it comes before the ranks agree on the step
        updater = _updater(state, ring.layout, groups, gradients)
    except Exception as error:
        if is_step:
            state.refuse_step(error)
        raise
    chunks = state.chunks()
    if state.slots.is_working:
        chunks = [c for c in chunks if updater.touched(c)]
    return new_pass(
        state, ring, groups, updater, chunks, source=state.slots.present, lock=state.update_lock
    )


def _updater(
    state: TrainingState,
    layout: Layout,
    groups: Groups,
    gradients: Sequence[torch.Tensor | None],
) -> ChunkUpdater:
    """Return what updates the chunks of a step, on the device that was chosen for it."""
    table, traffic = state.table, state.meter.traffic
    announce_uses(t.parameter for t in table.trainables if home_of(t.parameter) is None)
    inputs = StepInputs(
        layout=layout,
        groups=groups,
        parameters=memories(table.trainables),
        gradients=[values_for_step(gradient) for gradient in gradients],
        scalars=table.scalars,
        step=state.num_steps + 1,
        seed=state.options.rounding_seed,
        factors=state.gradient_factors,
    )
    if state.compute is None:
        kernel, is_filed = state.kernel.kernel, state.options.parameters == "drive"
        host = HostUpdater(
            state.rule,
            state.pool,
            inputs,
            kernel=kernel,
            traffic=traffic,
            copies_all=is_filed,
            unwritten=_unwritten(table.trainables) if is_filed else (),
        )
        state.update_code = host.code(state.kernel.code)
        return host
    updater = DeviceUpdater(state.rule, state.pool, inputs, compute=state.compute)
    state.update_code = updater.code(f"kernels ({state.compute.device})")
    return updater


def _unwritten(trainables: Sequence[Trainable]) -> set[int]:
    """Return the numbers of parameters that belong in the slot's model file, and are in memory."""
    return {
        number
        for number, one in enumerate(trainables)
        if stays_filed(one.parameter) and not isinstance(one.memory, FiledTensor)
    }


def new_pass(
    state: TrainingState,
    ring: Streamer,
    groups: Groups,
    work: ChunkWork,
    chunks: Sequence[int],
    *,
    source: StateSource | None,
    lock: AbstractContextManager[object] | None = None,
) -> StatePass:
    """Return a pass that writes the working slot, or a new slot if there is no working slot."""
    return StatePass(
        ring,
        work,
        step=state.num_steps + 1,
        source=source,
        target=state.slots.target(ring.layout, len(groups)),
        chunks=chunks,
        seal=state.seal,
        run=state.pool.map,
        lock=lock,
    )


def pass_ended(state: TrainingState, state_pass: StatePass, scalars: list[Scalars | None]) -> None:
    """Record that a pass has succeeded, and read ahead for the next one."""
    state.table.scalars = scalars
    sealing = state.seal.slot if state.seal is not None else None
    ring, previous = state_pass.streamer, state.slots.moved_to(state_pass.target, sealing)
    if previous is not None:
        ring.synchronize()
        state.store.release(previous)
    ring.begin(state.slots.present, state.chunks())


def pass_failed(state: TrainingState, state_pass: StatePass, error: BaseException) -> BaseException:
    """Record that a pass has failed half way, and return the exception to raise."""
    state.lifecycle.broken = f"step {state_pass.step} failed half way ({error!r})"
    state.num_steps = state_pass.step - 1
    state.slots.torn(state_pass.target)
    # With several ranks, the error that all of them raise has the damage as its cause.
    damage = error if isinstance(error, DamagedError) else error.__cause__
    if not isinstance(damage, DamagedError):
        return error
    refusal = ""
    source = state_pass.source
    checkpoint = None if source is None else state.store.checkpoint_of(source)
    if isinstance(source, RecutSource):
        checkpoint = state.slots.sealed
    if checkpoint is not None:
        refusal = try_to_quarantine(state.store, checkpoint, damage)
    if damage is not error:
        return error
    return DamagedError(f"{error}; {refusal or state.lifecycle.remedy()}")
