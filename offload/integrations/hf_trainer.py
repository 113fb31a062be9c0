"""The Trainer of Hugging Face: the folders it has written, and what its call says.

A callback is given only a part of the latter.
"""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from accelerate.state import AcceleratorState
from transformers import Trainer, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, OPTIMIZER_NAME_BIN, TRAINER_STATE_NAME
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from offload import CheckpointError, OffloadError, Position, list_checkpoints
from offload.integrations.carried_files import damage_of, write_newest
from offload.integrations.first_rank import num_hosts_of_launcher, require_one_host
from offload.integrations.listed_folders import is_sharded, positions_in_file, reference_in

Directory = str | bytes | os.PathLike[str]
Directories = Directory | Sequence[Directory]
"""Directory of a store, or its directories on several drives."""

_NAME = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-[0-9]+")

_SHARDS = "optimizer_0"
"""Directory of a folder that accelerate writes with FSDP2, if each process saves its shards."""

ATTACH = "Pass callbacks=[OffloadCallback()] to the Trainer that saves"
"""Advice for a user whose folder was saved without the callback."""


def latest_checkpoint(
    output_dir: str | os.PathLike[str], directory: Directories, *, verify: bool = False
) -> str | None:
    """Return the newest folder that training can continue from; None if there is none yet.

    Pass the result as ``resume_from_checkpoint``. Unlike the value ``True``, this allows a first
    start, and skips folders that a killed process has not finished, and folders whose checkpoint is
    gone from the store. If no folder is left, the newest one whose checkpoint carries its files is
    written anew, for example after a pull from a tier. Each byte of that checkpoint is read first.

    The function warns if it skips a folder that was saved without `OffloadCallback`, and if no
    checkpoint of the store belongs to any folder. If the store is empty, a folder that was saved
    with a torch optimizer is returned as well.

    Args:
        output_dir: Output directory of the Trainer.
        directory: Directory of the optimizer's store, or its directories on several drives.
        verify: Read every byte of the checkpoint before its folder is returned (with Adam, 14 bytes
            per bf16 parameter). A damaged checkpoint is quarantined and skipped, with a warning.

    Raises:
        DamagedError: With `verify`, the checkpoint before a damaged one is damaged, too. It is not
            quarantined, since a machine with bad memory would condemn one checkpoint after another.
        StoreError: With `verify`, or to write a folder anew, a checkpoint cannot be read.
    """
    try:
        names = os.listdir(output_dir)
    except FileNotFoundError:
        names = []
    steps = (name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-") for name in names)
    numbers = sorted((int(step) for step in steps if step.isdecimal()), reverse=True)
    store, *parts = _paths(directory)
    try:
        infos = list_checkpoints(store)
    except (CheckpointError, FileNotFoundError):
        infos = []
    resumable = [info for info in infos if info.valid and not info.parameters_only]
    sealed = {info.generation: info.path for info in resumable}
    lost = ""
    newest = None
    for number in numbers:
        folder = folder_of(output_dir, number)
        try:
            found_here = positions_in(folder)
        except OSError as error:
            lost = lost or f"skipping {folder}: it cannot be read ({error.strerror})"
            continue
        if found_here is None:
            continue
        position = found_here[0] if found_here else None
        if position is None and not infos:
            newest = folder
            break
        if position is None:
            lost = lost or (
                f"skipping {folder}: it has the state of torch's optimizer, which can be loaded "
                f"into an empty store only, and {store} has checkpoints"
            )
        elif not position.sealed:
            warnings.warn(
                f"skipping {folder}: it was saved without sealing the state, which is lost. "
                f"{ATTACH}",
                RuntimeWarning,
                stacklevel=2,
            )
        elif position.generation in sealed:
            path = sealed[position.generation]
            found = damage_of(path, parts) if verify else ""
            if not found:
                return folder
            warnings.warn(f"skipping {folder}: {found}", RuntimeWarning, stacklevel=2)
        else:
            lost = lost or (
                f"skipping {folder}: {store} has no checkpoint for it. If the state is in another "
                "directory, pass that one before this training removes or replaces the folder"
            )
    if newest is None:
        newest, why = write_newest("transformers", output_dir, resumable[::-1], parts, _NAME)
        lost = lost or why
    if lost:
        warnings.warn(lost, RuntimeWarning, stacklevel=2)
    return newest


def _paths(directory: Directories) -> list[str]:
    """Return the absolute paths of a store's directories."""
    given = [directory] if isinstance(directory, str | bytes | os.PathLike) else list(directory)
    if not given:
        raise ValueError("directory must be a path, or a list of at least one")
    return [os.path.abspath(os.fsdecode(path)) for path in given]


def folder_of(output_dir: str | os.PathLike[str], step: int) -> str:
    """Return the path of the Trainer's folder for a step."""
    return os.path.join(output_dir, f"{PREFIX_CHECKPOINT_DIR}-{step}")


def positions_in(folder: str) -> list[Position] | None:
    """Return the position that a finished folder refers to; empty for a torch optimizer's state.

    None means that the Trainer has not finished the folder: it writes its own state last. No tensor
    is read.

    Raises:
        OSError: The folder cannot be read, which says nothing about what it has.
    """
    try:
        with open(os.path.join(folder, TRAINER_STATE_NAME), encoding="utf-8") as file:
            json.load(file)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    for name in (OPTIMIZER_NAME, OPTIMIZER_NAME_BIN):
        found = positions_in_file(os.path.join(folder, name))
        if found is not None:
            return found
    if not is_sharded(os.path.join(folder, _SHARDS)):
        return None
    position = reference_in(os.path.join(folder, _SHARDS), "optimizer")
    return [] if position is None else [position]


def handler() -> CallbackHandler | None:
    """Return the object that calls the Trainer's callbacks, from within such a call.

    The Trainer gives callbacks everything but itself and its list of callbacks.
    """
    found = (names.get("self") for names in _names_of_callers())
    return next((one for one in found if isinstance(one, CallbackHandler)), None)


def resumed_from() -> str:
    """Return the folder that a Trainer is loading, from within its call; empty if it loads none."""
    for names in _names_of_callers():
        folder = names.get("resume_from_checkpoint")
        if isinstance(folder, str) and isinstance(names.get("self"), Trainer):
            return folder
    return ""


def _names_of_callers() -> Iterator[Mapping[str, Any]]:
    """Yield the local variables of each function that is being called, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_locals
        frame = frame.f_back


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
    """Refuse arguments that are not supported with several processes."""
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
