"""Hints for users of a training library, which the call stack identifies.

Nothing is imported: a library that has made a call is imported already.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from itertools import islice

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
    No warning is given if that caller is known to discard the reference.

    Args:
        directory: The store's first directory.
        step: Optimizer steps taken.

    Returns:
        Whether it has warned.
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
