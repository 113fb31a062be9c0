"""Relation between another library's files and a store's checkpoints, which pins keep.

The library saves files of its own, with the `state_dict()` of the optimizer in them: a small
reference to a checkpoint. A checkpoint lists in its train state the files that it was sealed for.
It has one pin for each of these files that still names it. A file may be a directory, in which each
of several ranks has written its shards.
"""

from __future__ import annotations

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
    newest = next(reversed(optimizer.checkpoints()), None)
    if newest is None or newest.step != optimizer.num_steps:
        return {_FILES: [file]}
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
    return {**state, _FILES: sorted({*_listed_files(state), file})}


def files_of(optimizer: OffloadedOptimizer, checkpoint: CheckpointInfo, loaded: str) -> list[str]:
    """Return the files that may name a checkpoint; empty if it was not sealed for a file.

    Args:
        optimizer: Optimizer of the store.
        checkpoint: Checkpoint with the list of files that it was sealed for.
        loaded: File that training resumes from; empty if there is none. The other files may have
            been moved to its directory.
    """
    with open_checkpoint(checkpoint.path, parts=optimizer.directories[1:]) as opened:
        files = _listed_files(opened.train_state)
    beside = os.path.dirname(name_of_file(loaded)) if loaded else ""
    moved = [f"{beside}/{os.path.basename(file)}" for file in files if beside]
    return list(dict.fromkeys([*files, *moved]))


def _listed_files(train_state: Any) -> list[str]:
    listed = train_state.get(_FILES) if isinstance(train_state, dict) else None
    return [f for f in listed if isinstance(f, str)] if isinstance(listed, list) else []


def why_in_use(optimizer: OffloadedOptimizer, checkpoint: CheckpointInfo, loaded: str) -> str:
    """Return why a checkpoint must not be withdrawn without consent; empty if it is not in use."""
    files = files_of(optimizer, checkpoint, loaded)
    if not files:
        return "made by checkpoint()"
    others = [n for n in checkpoint.pins if not n.startswith(PIN_PREFIX)]
    if others:
        return f"pinned as {others[0]!r}"
    for file in files:
        if (named := checkpoints_named_in(file)) is None or _identity(checkpoint) in named:
            return f"named by {file}"
    return ""


def checkpoints_named_in(file: str) -> set[tuple[str, int, int]] | None:
    """Return the checkpoints that a file names, as store id, step and generation.

    None means that the file cannot be read. No tensor is read.
    """
    if "://" in file:
        return None  # files on a network are not read
    try:
        if os.path.isdir(file):
            is_whole = is_sharded(file) and os.path.isfile(os.path.join(file, _METADATA))
            return {_identity(p) for p in _references_in(file)} if is_whole else set()
        saved = torch.load(file, map_location="meta", mmap=True, weights_only=True)
        found = map(reference_of, saved.get("optimizer_states", ()))
        return {_identity(position) for position in found if position is not None}
    except FileNotFoundError:
        return set()
    except Exception:  # noqa: BLE001  (a file may be damaged in any way)
        return None


def _references_in(directory: str) -> list[Position]:
    """Return the positions that the optimizers of a directory refer to, in their order."""
    found: list[Position] = []
    while (position := reference_in(directory, f"optimizer_{len(found)}")) is not None:
        found.append(position)
    return found


def _identity(named: CheckpointInfo | Position) -> tuple[str, int, int]:
    return named.store, named.step, named.generation


def mend_pins(optimizer: OffloadedOptimizer, loaded: str) -> None:
    """Pin the checkpoints that files name, and remove the pins of files that are gone.

    This is needed since users move and remove files by hand, and a process may be killed between
    writing a file and pinning its checkpoint.

    Args:
        optimizer: Optimizer of the store.
        loaded: File that training resumes from; empty if there is none.
    """
    for name, path in decide(optimizer, lambda: _wrong_pins(optimizer, loaded)):
        if path is None:
            optimizer.unpin(name)
        else:
            optimizer.pin(name, path)


def _wrong_pins(optimizer: OffloadedOptimizer, loaded: str) -> list[tuple[str, str | None]]:
    """Return names of pins to add, with the checkpoint's path, and to remove, with None."""
    wrong: list[tuple[str, str | None]] = []
    for checkpoint in optimizer.checkpoints():
        for file in files_of(optimizer, checkpoint, loaded):
            name, named = pin_name(file), checkpoints_named_in(file)
            pinned = name in checkpoint.pins
            if named is not None and pinned and not os.path.lexists(file):
                wrong.append((name, None))
            elif named is not None and not pinned and _identity(checkpoint) in named:
                wrong.append((name, checkpoint.path))
    return wrong


def pin_name(file: str) -> str:
    """Return the name of the pin for a file: readable, and different for each path."""
    stem = re.sub("[^A-Za-z0-9]+", "-", os.path.basename(file).removesuffix(".ckpt"))[:40]
    return f"{PIN_PREFIX}{stem}-{hashlib.blake2b(os.fsencode(file), digest_size=5).hexdigest()}"


def name_of_file(path: Any) -> str:
    """Return the absolute path of a file, or its URL, as this module lists it."""
    name: str = os.fsdecode(path)
    return name if "://" in name else os.path.abspath(name)


def make_durable(file: str) -> None:
    """Sync a local file and its directory, before an older file may be removed.

    If it is a directory, all that is in it is synced as well.
    """
    if not os.path.exists(file):
        return
    within = [os.path.join(root, name) for root, _, names in os.walk(file) for name in names]
    for path in (*within, file, os.path.dirname(file)):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
