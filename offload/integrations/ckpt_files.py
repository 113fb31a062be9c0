"""Relation between another library's files and a store's checkpoints, which pins keep.

The library saves files of its own, with the `state_dict()` of the optimizer in them: a small
reference to a checkpoint. A checkpoint lists in its train state the files that it was sealed for.
It has one pin for each of these files that still names it. A file may be a directory, in which each
of several ranks has written its shards.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
from typing import Any

import torch

from offload import (
    CheckpointInfo,
    OffloadedOptimizer,
    OffloadError,
    Position,
    open_checkpoint,
    reference_of,
)
from offload.integrations.first_rank import decide, rank_of
from offload.integrations.listed_folders import ListedFolders, log_kept, log_released
from offload.integrations.places import inode_of_parent, is_remote
from offload.integrations.sharded_files import is_sharded, reference_in

PIN_PREFIX = "lightning-"
"""Prefix of the names of all pins that belong to files."""

_METADATA = "meta.pt"
"""File that Lightning writes last into a directory with shards."""

_FILES = "lightning_files"
"""Key in a checkpoint's train state: its value lists the files that it was sealed for."""


def train_state(optimizer: OffloadedOptimizer, file: str) -> dict[str, Any]:
    """Return the train state to seal the present state with, as a checkpoint that a file names.

    If this step has been sealed already, its train state is kept, and the file is added to it.

    Args:
        optimizer: Optimizer of the state.
        file: Path of the file, as from `name_of_file`.

    Raises:
        OffloadError: This step has been sealed with a train state that is not a dict.
    """
    optimizer.synchronize()
    if not is_remote(file):
        os.makedirs(os.path.dirname(file), exist_ok=True)  # as Lightning is about to do
    survey = _listed("").survey(optimizer)
    folders = {file: inode_of_parent(file, survey.known)}
    entry = {"folders": folders, "store": optimizer.directories[0]}
    newest = next(reversed(optimizer.checkpoints()), None)
    if newest is None or newest.step != optimizer.num_steps:
        return {_FILES: entry}
    with open_checkpoint(newest.path, parts=optimizer.directories[1:]) as checkpoint:
        states, rank = checkpoint.train_states, rank_of(optimizer)
        found = states[rank] if rank < len(states) else states[0]
        state = {} if found is None else found
    if not isinstance(state, dict):
        raise OffloadError(
            f"{file} must refer to {newest.path}, whose train state is a {type(state).__name__}, "
            "so that the reference cannot be added to it: pass a dict as the train state to "
            "checkpoint()"
        )
    uses = survey.uses.get(newest.generation) or ()
    others = {use.folder: use.inode for use in uses if use.status != "removed"}
    return {**state, _FILES: {**entry, "folders": {**others, **folders}}}


def why_in_use(optimizer: OffloadedOptimizer, checkpoint: CheckpointInfo, loaded: str) -> str:
    """Return why a checkpoint must not be withdrawn without consent; empty if it is not in use."""
    uses = _listed(loaded).survey(optimizer).uses.get(checkpoint.generation)
    if uses is None:
        return "made by checkpoint()"
    others = [n for n in checkpoint.pins if not n.startswith(PIN_PREFIX)]
    if others:
        return f"pinned as {others[0]!r}"
    for use in uses:
        if use.status in ("refers", "unreadable", "missing"):
            return f"named by {use.folder}"
    return ""


def _listed(loaded: str) -> ListedFolders:
    """Return the files that checkpoints list.

    Args:
        loaded: File that training resumes from; empty if there is none. The other files may have
            been moved to its directory.
    """
    listed = ListedFolders(_FILES, positions_in)
    if loaded and not is_remote(loaded):
        listed.use(os.path.dirname(name_of_file(loaded)))
    return listed


def positions_in(file: str) -> list[Position] | None:
    """Return the positions that a file names; None if it is not finished. No tensor is read.

    Raises:
        OSError: The file cannot be read, or is damaged.
    """
    if os.path.isdir(file):
        is_whole = is_sharded(file) and os.path.isfile(os.path.join(file, _METADATA))
        return _references_in(file) if is_whole else None
    try:
        saved = torch.load(file, map_location="meta", mmap=True, weights_only=True)
        found = map(reference_of, saved.get("optimizer_states", ()))
        return [position for position in found if position is not None]
    except OSError:
        raise
    except Exception as error:
        raise OSError(errno.EBADMSG, "it is damaged", file) from error


def _references_in(directory: str) -> list[Position]:
    """Return the positions that the optimizers of a directory refer to, in their order."""
    found: list[Position] = []
    while (position := reference_in(directory, f"optimizer_{len(found)}")) is not None:
        found.append(position)
    return found


def mend_pins(optimizer: OffloadedOptimizer, loaded: str) -> None:
    """Pin the checkpoints that files name, and remove the pins of files that are gone.

    This is needed since users move and remove files by hand, and a process may be killed between
    writing a file and pinning its checkpoint.

    Args:
        optimizer: Optimizer of the store.
        loaded: File that training resumes from; empty if there is none.
    """
    for name, path in decide(optimizer, lambda: _wrong_pins(optimizer, loaded)).items():
        if path is None:
            optimizer.unpin(name)
        else:
            optimizer.pin(name, path)


def _wrong_pins(optimizer: OffloadedOptimizer, loaded: str) -> dict[str, str | None]:
    """Return names of pins to add, with the checkpoint's path, and to remove, with None."""
    added: dict[str, str | None] = {}
    removed: dict[str, str | None] = {}
    survey = _listed(loaded).survey(optimizer)
    for checkpoint in optimizer.checkpoints():
        for use in survey.uses.get(checkpoint.generation) or ():
            named = pin_name(use.folder)
            pins = {pin_name(file) for file in (use.folder, use.listed)} & {*checkpoint.pins}
            if use.status == "refers":
                if named not in pins:
                    added[named] = checkpoint.path
                pins -= {named}  # the file was listed with another path
            elif use.status != "removed":
                if pins:
                    log_kept(checkpoint, min(pins), [use], optimizer.directories[0])
                continue
            for name in pins:
                log_released(checkpoint, name, [use])
                removed[name] = None
    return {**added, **{name: None for name in removed if name not in added}}


def pin_name(file: str) -> str:
    """Return the name of the pin for a file: readable, and different for each path."""
    stem = re.sub("[^A-Za-z0-9]+", "-", os.path.basename(file).removesuffix(".ckpt"))[:40]
    return f"{PIN_PREFIX}{stem}-{hashlib.blake2b(os.fsencode(file), digest_size=5).hexdigest()}"


def name_of_file(path: Any) -> str:
    """Return the absolute path of a file, or its URL, as this module lists it."""
    name: str = os.fsdecode(path)
    return name if is_remote(name) else os.path.abspath(name)
