"""What the call of a Trainer says that gives a callback only a part of it."""

from __future__ import annotations

import sys
from types import FrameType

from accelerate.state import AcceleratorState
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from offload import OffloadError
from offload.integrations.first_rank import num_hosts_of_launcher, require_one_host


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


def fsdp_version(args: TrainingArguments) -> int:
    """Return the version of FSDP that the Trainer uses; 0 for none."""
    plugin = AcceleratorState._shared_state.get("fsdp_plugin")
    if plugin is not None:
        return int(plugin.fsdp_version)
    return int((args.fsdp_plugin_args or {}).get("fsdp_version", 0)) if args.fsdp else 0


def require_processes(args: TrainingArguments) -> None:
    """Refuse arguments that are not supported with several processes.

    Raises:
        OffloadError: The message names the argument, and says what to do instead.
    """
    if args.world_size == 1:
        return
    require_one_host(num_hosts_of_launcher(), "the Trainer")
    if fsdp_version(args) == 1:
        raise OffloadError(
            "fsdp_config={'version': 1}: FSDP1 is not supported, because it puts parameters of its "
            "own in the place of the model's: leave the version out, for FSDP2"
        )
    if args.deepspeed:
        raise OffloadError(
            "deepspeed=: DeepSpeed steps and saves by itself, with an optimizer of its own: leave "
            "it out, and use DistributedDataParallel or FSDP2 (fsdp=True)"
        )
    if args.enable_jit_checkpoint:
        raise OffloadError(
            "enable_jit_checkpoint=True is not supported with several processes: the signal "
            "reaches each of them in another step, so that they save different states. Use "
            "save_steps="
        )
