"""Guards of an engine's public calls, and the advice in their errors.

The call stack identifies users of a training library, for whom the advice is another one.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from itertools import islice

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
        """Check that the state may be stepped and sealed: it is alive, whole and decided about."""
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
        streamer = self._memory.streamer
        error = None if streamer is None else streamer.error
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


_SAVES = {
    ("transformers.trainer", "_save_optimizer_and_scheduler"): (
        "the Trainer's checkpoint folders cannot be resumed from",
        "pass callbacks=[offload.integrations.transformers.OffloadCallback()] to the Trainer",
    ),
    ("accelerate.checkpointing", "save_accelerator_state"): (
        "what save_state() writes cannot be loaded by another process",
        "call offload.integrations.accelerate.follow(accelerator, optimizer) before it",
    ),
    ("accelerate.utils.fsdp_utils", "save_fsdp_optimizer"): (
        "what accelerate is about to save with FSDP2 cannot be loaded",
        "call offload.integrations.accelerate.follow(accelerator, optimizer) before it",
    ),
    **{
        (f"{package}.trainer.connectors.checkpoint_connector", "dump_checkpoint"): (
            "the .ckpt files of this Trainer cannot be resumed from",
            "pass callbacks=[offload.integrations.lightning.OffloadCallback()] to the Trainer",
        )
        for package in ("lightning.pytorch", "pytorch_lightning")
    },
}
"""Functions that write checkpoints, by module and name: the consequence for the user, and the
remedy."""

_CKPT_PATH = (
    "pass ckpt_path=, the path of a .ckpt file (a tier has none: copy one from where it was "
    "written), to Trainer.fit()"
)
"""Advice on continuing under Lightning. It passes over ``ckpt_path="last"`` if it finds no file."""

_RESUMES = {
    "transformers.trainer": (
        "pass resume_from_checkpoint=latest_checkpoint(output_dir, directory), of "
        "offload.integrations.transformers, whose warning says why if it returns None, to "
        "Trainer.train()"
    ),
    "lightning.pytorch.trainer.trainer": _CKPT_PATH,
    "pytorch_lightning.trainer.trainer": _CKPT_PATH,
}
"""Advice on continuing from a checkpoint, by the module that runs the training."""

_TAKES_BACK = ("accelerate.optimizer", "__init__")
"""Function that takes a state dict and loads it back at once, so that nothing is saved."""

_NEAR = 16
"""Maximal number of frames between a library's save and the optimizer's `state_dict`: wrappers and
decorators."""


def warn_unsealed(directory: str, step: int) -> bool:
    """Warn that `state_dict` returns a reference to a state that has not been sealed.

    The warning points at the caller of `state_dict`, two calls above the caller of this function.
    Returns whether it has warned: not if that caller is known to discard the reference.
    """
    lost = "the reference that state_dict() has returned cannot be resumed from"
    remedy = (
        "Call checkpoint() before state_dict(), or save full_state_dict(), which is the whole state"
    )
    for caller in islice(_callers(), _NEAR):
        if caller == _TAKES_BACK:
            return False
        if caller in _SAVES:
            lost, do = _SAVES[caller]
            remedy = f"To seal it with each save, {do}"
            break
    warnings.warn(
        f"{lost}: the state of step {step} in {directory} is not a checkpoint, and is lost when "
        f"this process ends. {remedy}",
        RuntimeWarning,
        stacklevel=4,
    )
    return True


def how_to_resume() -> str:
    """Return advice on continuing from the newest checkpoint, for the library that calls."""
    for module, _ in _callers():
        if module in _RESUMES:
            return _RESUMES[module]
    return "call restore()"


def _callers() -> Iterator[tuple[str, str]]:
    """Yield the module and function name of each call under way, the innermost one first."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        yield frame.f_globals.get("__name__", ""), frame.f_code.co_name
