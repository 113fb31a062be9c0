"""Which files name which checkpoints, and the pins that keep those for them.

Of a library that saves files of its own, in which it keeps `state_dict()` of the optimizer: a small
reference to a checkpoint. A checkpoint lists in its train state the files that it was sealed for,
and has one pin for each of them that names it.
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

PIN_PREFIX = "lightning-"
"""Begins the names of all pins that are for files."""

_FILES = "lightning_files"
"""In the train state of a checkpoint: which files it was sealed for."""


def train_state(optimizer: OffloadedOptimizer, file: str) -> dict[str, Any]:
    """Return what a checkpoint of the present state holds, if a file is to name it, too."""
    optimizer.synchronize()
    newest = next(reversed(optimizer.checkpoints()), None)
    if newest is None or newest.step != optimizer.num_steps:
        return {_FILES: [file]}
    with open_checkpoint(newest.path) as checkpoint:
        state = {} if checkpoint.train_state is None else checkpoint.train_state
    if not isinstance(state, dict):
        raise OffloadError(
            f"{newest.path} is of the step that {file} is to name, and checkpoint() was given a "
            f"{type(state).__name__} for its train state: give it a dict, to which what is needed "
            "here can be added"
        )
    return {**state, _FILES: sorted({*_listed_files(state), file})}


def files_of(checkpoint: CheckpointInfo, loaded: str) -> list[str]:
    """Return the files that may name a checkpoint; none if it was not sealed for any.

    Args:
        checkpoint: Knows the paths of the files that it was sealed for.
        loaded: The file that is being resumed from: the others may have been moved with it.
    """
    with open_checkpoint(checkpoint.path) as opened:
        files = _listed_files(opened.train_state)
    beside = os.path.dirname(name_of_file(loaded)) if loaded else ""
    moved = [f"{beside}/{os.path.basename(file)}" for file in files if beside]
    return list(dict.fromkeys([*files, *moved]))


def _listed_files(train_state: Any) -> list[str]:
    listed = train_state.get(_FILES) if isinstance(train_state, dict) else None
    return [f for f in listed if isinstance(f, str)] if isinstance(listed, list) else []


def wanted_by(checkpoint: CheckpointInfo, loaded: str) -> str:
    """Return why a checkpoint must not be given up without being asked; empty if nobody cares."""
    files = files_of(checkpoint, loaded)
    if not files:
        return "made by checkpoint()"
    others = [n for n in checkpoint.pins if not n.startswith(PIN_PREFIX)]
    if others:
        return f"pinned as {others[0]!r}"
    for file in files:
        if (named := named_by(file)) is None or _identity(checkpoint) in named:
            return f"named by {file}"
    return ""


def named_by(file: str) -> set[tuple[str, int, int]] | None:
    """Return which checkpoints a file names; None if that cannot be told. Reads no tensor."""
    if "://" in file:
        return None  # not looked for over a network
    try:
        saved = torch.load(file, map_location="meta", mmap=True, weights_only=True)
        found = map(reference_of, saved.get("optimizer_states", ()))
        return {_identity(position) for position in found if position is not None}
    except FileNotFoundError:
        return set()
    except Exception:  # noqa: BLE001  (whatever is wrong with it)
        return None


def _identity(named: CheckpointInfo | Position) -> tuple[str, int, int]:
    return named.store, named.step, named.generation


def mend_pins(optimizer: OffloadedOptimizer, loaded: str) -> None:
    """Pin what files name, and remove pins for files that are gone.

    Files are moved and removed by hand, and a process may be killed between a file and its pin.
    """
    for checkpoint in optimizer.checkpoints():
        for file in files_of(checkpoint, loaded):
            name, named = pin_name(file), named_by(file)
            pinned = name in checkpoint.pins
            if named is not None and pinned and not os.path.lexists(file):
                optimizer.unpin(name)
            elif named is not None and not pinned and _identity(checkpoint) in named:
                optimizer.pin(name, checkpoint)


def pin_name(file: str) -> str:
    """Name the pin for a file: readable, and different for each path."""
    stem = re.sub("[^A-Za-z0-9]+", "-", os.path.basename(file).removesuffix(".ckpt"))[:40]
    return f"{PIN_PREFIX}{stem}-{hashlib.blake2b(file.encode(), digest_size=5).hexdigest()}"


def name_of_file(path: Any) -> str:
    """Return the path of a file, or its URL, as it is known by here."""
    name: str = os.fspath(path)
    return name if "://" in name else os.path.abspath(name)


def make_durable(file: str) -> None:
    """Sync a local file and its directory: an older one may be removed next."""
    if os.path.isfile(file):
        for path in (file, os.path.dirname(file)):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
