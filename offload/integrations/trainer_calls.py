"""What the call of a Trainer says that gives a callback only a part of it."""

from __future__ import annotations

import sys
from types import FrameType

from transformers import Trainer
from transformers.trainer_callback import CallbackHandler


def handler() -> CallbackHandler | None:
    """Return the object that calls the Trainer's callbacks, from within such a call.

    The Trainer gives callbacks everything but itself and its list of callbacks.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if isinstance(found := frame.f_locals.get("self"), CallbackHandler):
            return found
        frame = frame.f_back
    return None


def resumed_from() -> str:
    """Return the folder that a Trainer is loading, from within its call; empty if it loads none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        folder = frame.f_locals.get("resume_from_checkpoint")
        if isinstance(folder, str) and isinstance(frame.f_locals.get("self"), Trainer):
            return folder
        frame = frame.f_back
    return ""


def has_readers(handler: CallbackHandler | None) -> bool:
    """Return whether callbacks may read parameters between a step and the next forward."""
    return handler is None or not all(
        type(callback).__module__.startswith(("transformers.", "offload."))
        for callback in handler.callbacks
    )
