"""Quarantine: damaged checkpoints are marked on the drive, so that no process uses them again.

A checkpoint is quarantined by a file in its directory. Only the presence of the file counts; its
text is for people. The rest of the checkpoint is left as it is: a user may want to look at it,
repair it, or take its parameters, which may be whole. Removing the file lifts the quarantine.
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
from offload.store.store_errors import Poison

if TYPE_CHECKING:
    from offload.checkpoint.checkpoint import Checkpoint
    from offload.checkpoint.verify import VerifyReport
    from offload.store.opening import StoredCheckpoint
    from offload.store.slots.slot import Slot

_NOT_MARKED = "a damaged checkpoint could not be marked"


def write_quarantine(backend: Backend, path: str, reason: str, poison: Poison) -> None:
    """Mark a checkpoint as damaged; durable on return. Idempotent.

    Args:
        backend: Backend of the checkpoint.
        path: Directory of the checkpoint.
        reason: Description of the damage, for people.
        poison: Poison of the store; set if a sync fails.

    Raises:
        gds.StorageError: The mark could not be written, or could not be made durable.
    """
    mark = f"{path}/{QUARANTINE_NAME}"
    if backend.stat(mark) is None:
        data = reason.encode(errors="replace")[:MAX_REASON_BYTES] + b"\n"
        file = _create_mark(backend, mark, len(data))
        if file is not None:
            with file:
                file.write_bytes(data, 0)
                with poison.fatal(_NOT_MARKED):
                    file.sync()
    with poison.fatal(_NOT_MARKED):
        backend.sync_dir(path)


def _create_mark(backend: Backend, mark: str, nbytes: int) -> File | None:
    """Create the file of a mark; return None if another process has created it already."""
    try:
        return backend.create(mark, nbytes)
    except StorageError as error:
        if error.errno != errno.EEXIST:
            raise
        return None


def remove_quarantine(backend: Backend, path: str) -> None:
    """Lift the mark of a checkpoint that was found to be whole; durable on return.

    The caller holds a lock on the checkpoint, so that no process rewrites it meanwhile.
    """
    remove_mark(backend, path)
    backend.sync_dir(path)


def verify_and_mark(
    checkpoint: Checkpoint, progress: Callable[[int, int], None] | None = None
) -> VerifyReport:
    """Verify a checkpoint and record the verdict in its directory; durable on return.

    A damaged checkpoint is quarantined, and the quarantine of a whole checkpoint is lifted. The
    same holds for each part of another owner that is seen here: it has a mark of its own. If no
    damage is found but some data could not be read, the quarantine stays as it is. This may run
    beside a process that trains in the store, as `Checkpoint.verify` may.

    If the store is on several drives, open the checkpoint with ``parts=``, the directories on the
    further drives. Without them, only the manifest names these directories, and they may belong to
    the store that this one is a copy of. Then damage in them is reported but does not quarantine
    the checkpoint (`VerifyReport.not_marked`), and a quarantine is never lifted.

    Args:
        checkpoint: Checkpoint to verify. Open it with ``even_quarantined=True`` if its quarantine
            is to be lifted.
        progress: Function that is called with the bytes checked so far and the total.

    Returns:
        Result of the verification. Its `VerifyReport.quarantined` is the reason for the quarantine
        after this call, or empty.

    Raises:
        RecycledError: The checkpoint was not opened by `open_checkpoint`, and has been recycled.
        gds.StorageError: The quarantine could not be made durable, or could not be lifted.
    """
    with checkpoint.held():
        report = checkpoint.verify(progress)
        own = [problem for problem in report.problems if problem not in report.not_marked]
        if own:
            poison = Poison(checkpoint.path)
            write_quarantine(checkpoint.backend, checkpoint.path, "; ".join(own), poison)
        elif report.ok and not checkpoint.parts_are_only_recorded:
            remove_quarantine(checkpoint.backend, checkpoint.path)
        for path, problems in report.damaged_parts:
            if checkpoint.owns_part(path):
                write_quarantine(checkpoint.backend, path, problems, Poison(path))
        for path in report.whole_parts:
            if checkpoint.owns_part(path):
                remove_quarantine(checkpoint.backend, path)
        return replace(report, quarantined=checkpoint.quarantined)


class Quarantine:
    """The checkpoints that this process has found damaged.

    Args:
        backend: Backend of the checkpoints.
        poison: Poison of the store; set if syncing a mark fails.
    """

    def __init__(self, backend: Backend, poison: Poison) -> None:
        self._backend = backend
        self._poison = poison
        self._checkpoints: list[StoredCheckpoint] = []

    def add(self, checkpoint: StoredCheckpoint, reason: str) -> None:
        """Mark a checkpoint as damaged, durably; warn if that fails.

        Args:
            checkpoint: Checkpoint to mark.
            reason: Description of the damage, for people.
        """
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
        """Return whether a slot belongs to one of these checkpoints."""
        return any(checkpoint.slot is slot for checkpoint in self._checkpoints)

    def close(self) -> None:
        """Close the files of these checkpoints. Idempotent."""
        for checkpoint in self._checkpoints:
            if checkpoint.slot is not None:
                checkpoint.slot.close()


def remove_mark(backend: Backend, path: str) -> bool:
    """Remove the mark of a checkpoint; durable once the caller has synced the directory."""
    if not is_quarantined(backend, path):
        return False
    try:
        backend.remove(f"{path}/{QUARANTINE_NAME}")
    except StorageError as error:
        if error.errno != errno.ENOENT:  # else another process has removed the mark
            raise
    return True
