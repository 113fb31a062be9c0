"""Step strategies, which decide when the chunks of a step are updated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from offload.engine.seal_handle import SealHandle
from offload.engine.state_passes import advance, advanced, step_chunks
from offload.engine.training_state import Groups, TrainingState

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
        state, table = self._state, self._state.table
        state.require_step()
        with state.meter.timed("step_s"):
            state.lay_out_step(groups)
            gradients = state.gradients(groups)
            changes = advanced(state, groups)
            if table.has_gradient(groups):
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

    def restored(self) -> None:
        """Record that the state has been restored from a checkpoint."""

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
