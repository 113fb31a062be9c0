"""Guards of an engine's public calls, and the advice in their errors."""

from __future__ import annotations

import logging
import os

from offload.engine.caller_hints import how_to_resume
from offload.errors import BrokenOptimizerError, NotRestoredError, OffloadError, reason_of
from offload.store.state_store import StateStore
from offload.stream.memory import WorkingMemory

_log = logging.getLogger("offload")


class Lifecycle:
    """Record of whether an engine can be used, and checks of it."""

    def __init__(
        self, store: StateStore, memory: WorkingMemory, *, decided: bool, tier_url: str = ""
    ) -> None:
        self.store = store
        self.tier_url = tier_url
        """URL of the tier that `restore` looks at if the store is empty; empty for none."""
        self._memory = memory
        self.decided = decided
        """Whether the user has chosen to restore or to start over, or need not choose because the
        store has no checkpoints."""
        self._pid = os.getpid()
        self.closed = False
        """Whether the optimizer refuses further calls."""
        self.released = False
        """Whether all files, threads and locks have been released."""
        self.broken = ""
        """Reason why the working state is torn; empty if it is not."""
        self.steps_settled = self.steps_in_seal = 0
        """Two counts of this optimizer's steps: the steps that a checkpoint has or a restore has
        abandoned, and the steps that the newest seal will have."""

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to close: all is released, or this process is a forked child."""
        return self.released or os.getpid() != self._pid  # a child has neither threads nor lock

    def require_usable(self) -> None:
        """Check that the state may be stepped and sealed.

        Raises:
            OffloadError: The optimizer is closed, or was made in another process.
            BrokenOptimizerError: The state is torn; says how to go on.
            NotRestoredError: The store has checkpoints, and the user has neither restored one nor
                started over.
        """
        self.require_alive()
        self.broken = self.why_broken()
        if self.broken:
            raise BrokenOptimizerError(f"{self.broken}; {self.remedy()}")
        if not self.decided:
            names = [os.path.basename(c.path) for c in self.store.checkpoints]
            names += [os.path.basename(path) for path, _ in self.store.refused]
            raise NotRestoredError(
                f"{self.store.directory} already has checkpoints ({', '.join(names)}): "
                f"{how_to_resume()} to continue from the newest, or pass fresh=True to the "
                "optimizer to start over, which withdraws them"
            )

    def why_broken(self) -> str:
        """Return the reason why the state is torn or a transfer has failed; empty if neither."""
        error = self._memory.error
        if self.broken or error is None:
            return self.broken
        return f"a transfer of state failed ({reason_of(error)})"

    def log_lost_steps(self, num_steps: int) -> None:
        """Log that no checkpoint has the last steps of this optimizer."""
        newest = self.store.newest
        is_one = num_steps == 1
        _log.warning(
            "%s: %s lost: no checkpoint() was made after %s; %s",
            self.store.directory,
            "1 optimizer step is" if is_one else f"{num_steps} optimizer steps are",
            "it" if is_one else "them",
            f"the newest checkpoint is {newest.path}" if newest else "the store has none",
        )

    def remedy(self) -> str:
        """Return advice on going on from a state that is torn."""
        newest = self.store.newest
        if newest is None and self.store.refused:
            return (
                f"{self.store.directory} has no usable checkpoint left: repair one of them, or "
                "construct the optimizer again with fresh=True"
            )
        if newest is None and self.tier_url:
            return f"{how_to_resume()} to go on from the newest checkpoint in {self.tier_url}"
        if newest is None:
            return "there is no checkpoint yet: construct model and optimizer again"
        return f"{how_to_resume()} to continue from {newest.path}"

    def require_alive(self) -> None:
        """Raise `OffloadError` if the optimizer is closed, or was made in another process."""
        if self.closed:
            raise OffloadError("the optimizer is closed; construct it again")
        if os.getpid() != self._pid:
            raise OffloadError(
                "this optimizer was made in another process and its store is locked by that one: "
                "fork workers before constructing it, or let only the parent call it"
            )
