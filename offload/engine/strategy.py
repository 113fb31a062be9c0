"""Step strategies, which decide when the chunks of a step are updated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias

from offload.engine.seal import SealHandle
from offload.engine.state_passes import advance, advanced, step_chunks
from offload.engine.training_state import Groups, TrainingState

Metrics: TypeAlias = Mapping[str, float] | None
"""Checked metrics of a checkpoint. None means that none were given, so that an existing checkpoint
keeps its metrics."""


class StepStrategy(Protocol):
    """Way in which an engine takes its steps.

    A strategy works on the engine's `TrainingState` and does not know the engine. The state is not
    at rest while a step is in progress. The engine therefore calls `settle` or `give_up` before it
    does anything else with the state.
    """

    def attach(self, groups: Callable[[], Groups | None]) -> None:
        """Begin to follow the model if steps run beside it.

        Args:
            groups: Returns ``param_groups``, or None if the optimizer is gone.
        """
        ...

    def require_closures(self) -> None:
        """Raise `OverlapError` if a step cannot evaluate the model itself."""
        ...

    def require_unscaled(self) -> None:
        """Raise `OverlapError` if it is too late to unscale gradients or to skip the step."""
        ...

    def step(self, groups: Groups) -> None:
        """Update every parameter that has a gradient, or begin to update them."""
        ...

    def before_hooks(self) -> None:
        """Wait at the end of a step if the user's hooks could read parameters unnoticed."""
        ...

    def settle(self, call: str) -> None:
        """Bring the state to rest, for a call of the user.

        Args:
            call: Name of the call, for messages.

        Raises:
            OverlapError: The state is half stepped, and stays so until the user calls `step`.
            BaseException: The step in progress failed, and its error has not been raised before.
        """
        ...

    def seal_at_end(
        self, groups: Groups, train_state: object, metrics: Metrics
    ) -> SealHandle | None:
        """Begin a checkpoint that is made when the step in progress ends."""
        ...

    def give_up(self) -> None:
        """Bring the state to rest for a restore, even if the step in progress fails."""
        ...

    def restored(self) -> None:
        """Record that the state has been restored from a checkpoint."""
        ...

    def laid_out(self) -> None:
        """Record that the layout of the state has changed."""
        ...

    def added(self, groups: Groups) -> None:
        """Record that the user has added a parameter group."""
        ...

    def end(self) -> None:
        """Wait for the step in progress, or give it up, and stop following the model.

        If this method is interrupted, it can be called again.
        """
        ...

    def raise_pending(self) -> None:
        """Raise an error that a step, or a checkpoint at its end, has left unraised."""
        ...


class InsideStep:
    """Strategy whose steps have ended when `step` returns.

    Args:
        state: Training state of the engine.
    """

    def __init__(self, state: TrainingState) -> None:
        self._state = state

    def step(self, groups: Groups) -> None:
        """Update every parameter that has a gradient, and wait until this is done."""
        take_step(self._state, groups)

    def attach(self, groups: Callable[[], Groups | None]) -> None:
        """Do nothing: the model is not followed."""

    def require_closures(self) -> None:
        """Do nothing: a step can evaluate the model."""

    def require_unscaled(self) -> None:
        """Do nothing: no gradient is applied before `step`."""

    def before_hooks(self) -> None:
        """Do nothing: the step has ended."""

    def settle(self, call: str) -> None:
        """Do nothing: the state is at rest."""

    def seal_at_end(
        self,
        groups: Groups,  # noqa: ARG002
        train_state: object,  # noqa: ARG002
        metrics: Metrics,  # noqa: ARG002
    ) -> SealHandle | None:
        """Return None: the state is at rest."""
        return None

    def give_up(self) -> None:
        """Do nothing: no step is in progress."""

    def restored(self) -> None:
        """Do nothing."""

    def laid_out(self) -> None:
        """Do nothing."""

    def added(self, groups: Groups) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing: no step is in progress."""

    def raise_pending(self) -> None:
        """Do nothing: every error has been raised."""


def take_step(state: TrainingState, groups: Groups) -> None:
    """Update every parameter that has a gradient, and wait until this is done.

    Args:
        state: The state.
        groups: ``param_groups`` of the optimizer.

    Raises:
        NotRestoredError: The store has checkpoints; call `restore` or pass fresh=True first.
        SealError: The seal before this step failed. The step has not been taken.
        BrokenOptimizerError: An earlier step failed half way.
    """
    with state.refusing_step():
        state.lifecycle.require_usable()
    state.collect_seal()
    table, meter = state.table, state.meter
    with meter.timed("step_s"):
        if not table.is_current(groups):
            state.relayout(groups)
        with state.refusing_step():
            gradients = table.gradients(groups)
        changes = advanced(state, groups)
        if table.has_gradient(groups):
            step_chunks(state, groups, gradients)
            meter.steps += 1
        advance(groups, changes)
        state.num_steps += 1
