"""Which library's loop a call has come from, so that its users are told what they can do.

Nothing is imported for it: a library that has called is there already.
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
    **{
        (f"{package}.trainer.connectors.checkpoint_connector", "dump_checkpoint"): (
            "the .ckpt files of this Trainer cannot be resumed from",
            "pass callbacks=[offload.integrations.lightning.OffloadCallback()] to the Trainer",
        )
        for package in ("lightning.pytorch", "pytorch_lightning")
    },
}
"""What writes a folder, by module and function: what becomes of it, and what helps."""

_RESUMES = {
    "transformers.trainer": (
        "pass resume_from_checkpoint=latest_checkpoint(output_dir, directory), of "
        "offload.integrations.transformers, to Trainer.train()"
    ),
    "lightning.pytorch.trainer.trainer": "pass ckpt_path= to Trainer.fit()",
    "pytorch_lightning.trainer.trainer": "pass ckpt_path= to Trainer.fit()",
}
"""How users of a library go on from a checkpoint, by the module that runs their training."""

_TAKES_BACK = ("accelerate.optimizer", "__init__")
"""What loads at once the state dict that it takes: nothing is written."""

_NEAR = 16
"""Frames between a library's save and the optimizer's `state_dict`: wrappers and decorators."""


def warn_unsealed(directory: str, step: int) -> None:
    """Warn that `state_dict` returns a reference to a state that nobody has sealed.

    The warning points at the caller of `state_dict`, two calls above the caller of this. It is left
    out if that caller is known to keep nothing of the reference.

    Args:
        directory: Of the store.
        step: Optimizer steps taken.
    """
    lost = "the reference that state_dict() has returned cannot be resumed from"
    remedy = (
        "Call checkpoint() before state_dict(), or save full_state_dict(), which is the whole state"
    )
    for caller in islice(_callers(), _NEAR):
        if caller == _TAKES_BACK:
            return
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


def how_to_resume() -> str:
    """Return what to do to go on from the newest checkpoint, in the words of whose loop it is."""
    for module, _ in _callers():
        if module in _RESUMES:
            return _RESUMES[module]
    return "call restore()"


def _callers() -> Iterator[tuple[str, str]]:
    """Yield module and function of each call that is under way, the innermost one first."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        yield frame.f_globals.get("__name__", ""), frame.f_code.co_name
