"""Guards of an engine's public calls, and the advice in their errors."""

from __future__ import annotations

import logging
import os

from offload.engine.caller_hints import how_to_resume
from offload.errors import BrokenOptimizerError, NotRestoredError, OffloadError, reason_of
from offload.store.store import Store

_log = logging.getLogger("offload")


class Usable:
    """The part of an engine that knows whether the engine can be used.

    Args:
        store: Store that this process has opened.
        decided: Whether the store has no checkpoints, or the user has decided about them.
    """

    def __init__(self, store: Store, *, decided: bool) -> None:
        self.store = store
        self._decided = decided
        self._pid = os.getpid()
        self._closed = False
        self._broken = ""
        """Reason why the working state is torn; empty if it is not."""
        self._steps_settled = self._steps_in_seal = 0
        """Two counts of this optimizer's steps: the steps that a checkpoint has or a restore has
        abandoned, and the steps that the newest seal will have."""

    def require_closures(self) -> None:
        """Raise `OverlapError` if a step cannot evaluate the model itself."""

    def require_unscaled(self) -> None:
        """Raise `OverlapError` if it is too late to unscale gradients or to skip the step."""

    @property
    def _transfer_error(self) -> Exception | None:
        """Error of a failed transfer, which has torn the working state; None if none failed."""
        return None

    def _require_usable(self) -> None:
        """Raise an error if the optimizer is closed or torn, or if a restore is still due."""
        self._require_alive()
        if self._transfer_error is not None:
            self._broken = (
                self._broken or f"a transfer of state failed ({reason_of(self._transfer_error)})"
            )
        if self._broken:
            raise BrokenOptimizerError(f"{self._broken}; {self._remedy()}")
        if not self._decided:
            names = [os.path.basename(c.path) for c in self.store.checkpoints]
            names += [os.path.basename(path) for path, _ in self.store.refused]
            raise NotRestoredError(
                f"{self.store.directory} already has checkpoints ({', '.join(names)}): "
                f"{how_to_resume()} to continue from the newest, or pass fresh=True to the "
                "optimizer to start over"
            )

    def _say_what_is_lost(self, num_steps: int) -> None:
        """Log that no checkpoint has the last steps of this optimizer.

        Args:
            num_steps: Number of these steps.
        """
        newest = self.store.newest
        is_one = num_steps == 1
        _log.warning(
            "%s: %s lost: no checkpoint() was made after %s; %s",
            self.store.directory,
            "1 optimizer step is" if is_one else f"{num_steps} optimizer steps are",
            "it" if is_one else "them",
            f"the newest checkpoint is {newest.path}" if newest else "the store has none",
        )

    def _remedy(self) -> str:
        """Return advice on going on from a state that is torn."""
        newest = self.store.newest
        if newest is None and self.store.refused:
            return (
                f"{self.store.directory} has no usable checkpoint left: repair one of them, or "
                "construct the optimizer again with fresh=True"
            )
        if newest is None:
            return "there is no checkpoint yet: construct model and optimizer again"
        return f"{how_to_resume()} to go on from {newest.path}"

    def _require_alive(self) -> None:
        """Raise `OffloadError` if the optimizer is closed, or belongs to another process."""
        if self._closed:
            raise OffloadError("the optimizer is closed; construct it again")
        if os.getpid() != self._pid:
            raise OffloadError(
                "this optimizer was made in another process and its store is locked by that one: "
                "fork workers before constructing it, or let only the parent call it"
            )
