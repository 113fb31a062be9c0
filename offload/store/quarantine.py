"""Checkpoints whose content was found damaged: marked on the drive, so that nobody tries again.

A checkpoint is quarantined by a file in it. Its presence is what counts; what it says is for
people. Nothing else of the checkpoint is touched: somebody may want to look at it, repair it, or
take its parameters, which may be whole. Removing the file lifts the quarantine.
"""

from __future__ import annotations

import errno
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from gds import Backend, File, StorageError
from offload.checkpoint.quarantine_mark import MAX_REASON_BYTES, is_quarantined
from offload.format.names import QUARANTINE_NAME
from offload.store.poison import Poison

if TYPE_CHECKING:
    from offload.checkpoint.checkpoint import Checkpoint
    from offload.checkpoint.verify import VerifyReport
    from offload.store.opening import StoredCheckpoint
    from offload.store.slot import Slot

_NOT_MARKED = "a damaged checkpoint could not be marked"


def write_quarantine(backend: Backend, path: str, reason: str, poison: Poison) -> None:
    """Mark a checkpoint as damaged; durable when this returns. Idempotent.

    Args:
        backend: Where it is.
        path: Its directory.
        reason: What is wrong with it.
        poison: Of the store.

    Raises:
        gds.StorageError: It could not be marked, or not durably.
    """
    mark = f"{path}/{QUARANTINE_NAME}"
    if backend.stat(mark) is None:
        data = reason.encode(errors="replace")[:MAX_REASON_BYTES] + b"\n"
        file = _created(backend, mark, len(data))
        if file is not None:
            try:
                file.write_bytes(data, 0)
                with poison.on_error(_NOT_MARKED):
                    file.sync()
            finally:
                file.close()
    with poison.on_error(_NOT_MARKED):
        backend.sync_dir(path)


def _created(backend: Backend, mark: str, nbytes: int) -> File | None:
    """Create the file of a mark; None if another process has been quicker."""
    try:
        return backend.create(mark, nbytes)
    except StorageError as error:
        if error.errno != errno.EEXIST:
            raise
        return None


def remove_quarantine(backend: Backend, path: str) -> None:
    """Lift the mark of a checkpoint that was found to be whole; durable when this returns.

    Whoever calls it holds a lock on the checkpoint, so that nobody rewrites it meanwhile.

    Raises:
        gds.StorageError: The mark could not be removed, or not durably; it may be there or not.
    """
    lift_quarantine(backend, path)
    backend.sync_dir(path)


def verify_and_mark(
    checkpoint: Checkpoint, progress: Callable[[int, int], None] | None = None
) -> VerifyReport:
    """Verify a checkpoint, and make the verdict last: durable when this returns.

    A checkpoint that is damaged is quarantined, and the quarantine of one that is whole is lifted.
    If something could not be read, nothing is known of it, and neither happens. This may run beside
    a process that trains in the store, as `Checkpoint.verify` may.

    Of a store on several drives, ``parts=`` has to say where the others are. If only the manifest
    says so, they may be those of the store that this one is a copy of: then damage in them marks
    nothing (`VerifyReport.not_marked`), and no quarantine is lifted because they are whole.

    Args:
        checkpoint: Opened with ``even_quarantined=True``, if its quarantine is to be lifted.
        progress: Called with the bytes checked so far and the bytes in all.

    Returns:
        What was found. `VerifyReport.quarantined` says whether it is quarantined now.

    Raises:
        RecycledError: It was not opened by `open_checkpoint`, and has been recycled.
        gds.StorageError: The quarantine could not be made durable, or not be lifted.
    """
    with checkpoint.held():
        report = checkpoint.verify(progress)
        own = [problem for problem in report.problems if problem not in report.not_marked]
        if own:
            poison = Poison(checkpoint.path)
            write_quarantine(checkpoint.backend, checkpoint.path, "; ".join(own), poison)
        elif report.ok and not checkpoint.parts_are_only_recorded:
            remove_quarantine(checkpoint.backend, checkpoint.path)
        return replace(report, quarantined=checkpoint.quarantined)


class Quarantine:
    """The checkpoints that this process has found damaged.

    Args:
        backend: Where they are.
        poison: Of their store.
    """

    def __init__(self, backend: Backend, poison: Poison) -> None:
        self._backend = backend
        self._poison = poison
        self._checkpoints: list[StoredCheckpoint] = []

    def add(self, checkpoint: StoredCheckpoint, reason: str) -> None:
        """Mark one durably, or warn that it could not be."""
        self._checkpoints.append(checkpoint)
        try:
            write_quarantine(self._backend, checkpoint.path, reason, self._poison)
        except StorageError as error:
            warnings.warn(
                f"{checkpoint.path} is damaged, and could not be marked as such ({error}): a later "
                "process will try it again",
                RuntimeWarning,
                stacklevel=3,
            )

    def has(self, slot: Slot) -> bool:
        """Return whether a slot is one of them."""
        return any(checkpoint.slot is slot for checkpoint in self._checkpoints)

    def close(self) -> None:
        """Close their files. Idempotent."""
        for checkpoint in self._checkpoints:
            if checkpoint.slot is not None:
                checkpoint.slot.close()


def lift_quarantine(backend: Backend, path: str) -> bool:
    """Remove the mark; durable when the directory is synced. Returns whether there was one."""
    if not is_quarantined(backend, path):
        return False
    try:
        backend.remove(f"{path}/{QUARANTINE_NAME}")
    except StorageError as error:
        if error.errno != errno.ENOENT:  # another process has been quicker
            raise
    return True
