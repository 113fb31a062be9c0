"""Pinning from outside the training process, safely beside it. Does not import torch."""

from __future__ import annotations

import errno
import os

from gds import Backend, PosixBackend
from offload.checkpoint.checkpoint import Checkpoint, open_for_parameters
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
    """Keep a checkpoint, whatever its store's retention says, until `unpin`; durable on return.

    A name that is in use is moved. To be used beside a process that trains in the store, or
    without one; the process that trains has `OffloadedOptimizer.pin` as well.

    Args:
        checkpoint: A path, or a `Checkpoint`. The path of a store means its newest.
        name: Letters, digits, ``.``, ``_`` and ``-``; at most 64.
        backend: Where it is; the local file system by default.

    Returns:
        The path of what has been pinned.

    Raises:
        PinError: A pin cannot be called that, or the checkpoint is not in a store.
        CheckpointNotFoundError: There is no such checkpoint any more.
        CheckpointError: Its manifest cannot be read.
        StoreBusyError: It is being recycled at this moment.
        gds.StorageError: The pin could not be written durably.
    """
    check_pin_name(name)
    path = checkpoint.path if isinstance(checkpoint, Checkpoint) else os.path.abspath(checkpoint)
    if backend is None and isinstance(checkpoint, Checkpoint):
        backend = checkpoint.backend
    with open_for_parameters(path, backend=backend) as opened:  # its lock keeps it from going
        if isinstance(checkpoint, Checkpoint) and opened.generation != checkpoint.generation:
            raise CheckpointNotFoundError(
                errno.ENOENT,
                f"generation {checkpoint.generation} has been recycled; this is another one",
                path,
            )
        store, base = os.path.split(opened.path)
        in_store = opened.backend.stat(f"{store}/{LOCK_NAME}") is not None
        if not in_store or step_of(base) is None:
            raise PinError(
                f"{opened.path}: not a checkpoint in a store, so nothing would ever recycle it: it "
                "needs no pin"
            )
        write_pin(opened.backend, store, pin_of(name, opened.path, opened.manifest))
        return opened.path


def unpin(store: str | os.PathLike[str], name: str, *, backend: Backend | None = None) -> None:
    """Remove a pin of a store, durably. What is not kept otherwise is recycled later.

    Raises:
        CheckpointNotFoundError: There is no pin of this name, or no store.
        gds.StorageError: It could not be removed durably.
    """
    directory = os.path.abspath(store)
    inner = backend or PosixBackend()
    try:
        if inner.stat(directory) is None:
            raise CheckpointNotFoundError(
                errno.ENOENT,
                "there is no store here; give the directory= that the training was given",
                directory,
            )
        remove_pin(inner, directory, name)
    finally:
        if backend is None:
            inner.close()
