"""Pinning from outside the training process, safe while that process runs.

Importing this module does not import torch.
"""

from __future__ import annotations

import errno
import os

from gds import Backend
from gds.opening import given_or_local
from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.opening import open_for_parameters
from offload.errors import CheckpointNotFoundError, PinError
from offload.format.names import LOCK_NAME, step_of
from offload.retention.pins import check_pin_name, remove_pin, write_pin
from offload.store.expiry import pin_of


def pin(
    checkpoint: str | os.PathLike[str] | Checkpoint,
    name: str,
    *,
    backend: Backend | None = None,
) -> str:
    """Keep a checkpoint until `unpin`, even if its store's policy drops it; durable on return.

    A pin whose name is already in use is moved to this checkpoint. Use this function beside a
    process that trains in the store, or without one. The training process itself can use
    `OffloadedOptimizer.pin` as well.

    Args:
        checkpoint: Path of a checkpoint, or a `Checkpoint`. The path of a store means its newest
            checkpoint.
        name: Name of the pin: at most 64 letters, digits, ``.``, ``_`` and ``-``, beginning with a
            letter or a digit.
        backend: Backend of the store. The default is the backend of a given `Checkpoint`, else the
            local file system.

    Returns:
        Path of the pinned checkpoint.

    Raises:
        PinError: The name is not a valid name of a pin, or the checkpoint is not in a store.
        CheckpointNotFoundError: The checkpoint does not exist any more.
        CheckpointError: The manifest of the checkpoint cannot be read.
        StoreBusyError: The checkpoint is being recycled at this moment.
        gds.StorageError: The pin could not be written durably.
    """
    check_pin_name(name)
    given = checkpoint.path if isinstance(checkpoint, Checkpoint) else checkpoint
    path = os.path.abspath(os.fsdecode(given))
    if backend is None and isinstance(checkpoint, Checkpoint):
        backend = checkpoint.backend
    with open_for_parameters(path, backend=backend) as opened:  # its lock prevents a withdrawal
        if isinstance(checkpoint, Checkpoint) and opened.generation != checkpoint.generation:
            raise CheckpointNotFoundError(
                errno.ENOENT,
                f"generation {checkpoint.generation} has been recycled; its directory now holds "
                "another checkpoint",
                path,
            )
        store, base = os.path.split(opened.path)
        in_store = opened.backend.stat(f"{store}/{LOCK_NAME}") is not None
        if not in_store or step_of(base) is None:
            raise PinError(
                f"{opened.path}: not a checkpoint in a store, so it is never recycled and needs "
                "no pin"
            )
        write_pin(opened.backend, store, pin_of(name, opened.path, opened.manifest))
        return opened.path


def unpin(store: str | os.PathLike[str], name: str, *, backend: Backend | None = None) -> None:
    """Remove a pin of a store, durably.

    A checkpoint that nothing else keeps is recycled later.

    Args:
        store: The store's first directory.
        name: Name of the pin.
        backend: Backend of the store; the local file system by default.

    Raises:
        PinError: The name is not a valid name of a pin.
        CheckpointNotFoundError: The pin does not exist, or the store does not exist.
        gds.StorageError: The pin could not be removed durably.
    """
    directory = os.path.abspath(os.fsdecode(store))
    with given_or_local(backend) as storage:
        if storage.stat(directory) is None:
            raise CheckpointNotFoundError(
                errno.ENOENT,
                "there is no store here; give the directory= that the training was given, and "
                "check that its drive is mounted",
                directory,
            )
        remove_pin(storage, directory, name)
