"""Quarantine: damaged checkpoints are marked on the drive, so that no process uses them again.

A checkpoint is quarantined by a file in its directory. Only the presence of the file counts; its
text is for people. The rest of the checkpoint is left as it is: a user may want to look at it,
repair it, or take its parameters, which may be whole. Removing the file lifts the quarantine.
"""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gds import Backend, StorageError
from offload.checkpoint.file_check import MAX_REASON_BYTES, is_quarantined, read_quarantine
from offload.checkpoint.reading import checkpoint_paths, decode_manifest
from offload.errors import CheckpointError, DamagedError
from offload.format.names import QUARANTINE_NAME
from offload.format.unreadable import reading
from offload.store.store_errors import Poison
from offload.units import part_options

if TYPE_CHECKING:
    from offload.checkpoint.checkpoint import Checkpoint
    from offload.checkpoint.verify import VerifyReport

_NOT_MARKED = "a damaged checkpoint could not be marked"


def write_quarantine(backend: Backend, path: str, reason: str, poison: Poison) -> None:
    """Mark the directory of a checkpoint or part as damaged; durable on return. Idempotent."""
    mark = f"{path}/{QUARANTINE_NAME}"
    if backend.stat(mark) is None:
        data = reason.encode(errors="replace")[:MAX_REASON_BYTES] + b"\n"
        try:
            file = backend.create(mark, len(data))
        except StorageError as error:
            if error.errno != errno.EEXIST:  # else another process has created it
                raise
        else:
            with file:
                file.write_bytes(data, 0)
                with poison.fatal(_NOT_MARKED):
                    file.sync()
    with poison.fatal(_NOT_MARKED):
        backend.sync_dir(path)


def try_to_mark(backend: Backend, path: str, reason: str, poison: Poison) -> None:
    """Mark a checkpoint or part that this process has found damaged; warn if that fails.

    The warning names the line of code of the caller's caller.
    """
    try:
        write_quarantine(backend, path, reason, poison)
    except StorageError as error:
        warnings.warn(
            f"{path} is damaged, and could not be marked as such ({error}): a later "
            "process will try it again",
            RuntimeWarning,
            stacklevel=3,
        )


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
    with checkpoint.held():  # so that no process rewrites it meanwhile
        report = checkpoint.verify(progress)
        own = [problem for problem in report.problems if problem not in report.not_marked]
        if own:
            poison = Poison(checkpoint.path)
            write_quarantine(checkpoint.backend, checkpoint.path, "; ".join(own), poison)
        elif report.ok and not checkpoint.parts_are_only_recorded:
            remove_mark(checkpoint.backend, checkpoint.path)
            checkpoint.backend.sync_dir(checkpoint.path)
        for path, problems in report.damaged_parts:
            if checkpoint.owns_part(path):
                write_quarantine(checkpoint.backend, path, problems, Poison(path))
        for path in report.whole_parts:
            if checkpoint.owns_part(path):
                remove_mark(checkpoint.backend, path)
                checkpoint.backend.sync_dir(path)
        return replace(report, quarantined=checkpoint.quarantined)


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


def verify_before_resume(
    checkpoint: Checkpoint, progress: Callable[[int, int], None] | None = None
) -> VerifyReport:
    """Verify a checkpoint that training is to continue from, and quarantine it if it is damaged.

    This function is `verify_and_mark` with a limit. Like `OffloadedOptimizer.restore`, it never
    marks two checkpoints in a row: if a newer checkpoint of the store is quarantined already,
    nothing is marked and no mark is lifted. It is for programs that choose a checkpoint before they
    have an optimizer, and choose an older one if this one is damaged.

    Args:
        checkpoint: Checkpoint from `open_checkpoint`.
        progress: Function that is called with the bytes checked so far and the total.

    Returns:
        Result of the verification.

    Raises:
        DamagedError: The checkpoint could be read and is damaged, and a newer one is quarantined
            already. The message says what to do.
        UnreadableError: The directory of the store could not be read.
        RecycledError: The checkpoint was not opened by `open_checkpoint`, and has been recycled.
        gds.StorageError: The quarantine could not be made durable, or could not be lifted.
    """
    store, backend = os.path.dirname(checkpoint.path), checkpoint.backend
    with reading():
        others = [p for p in checkpoint_paths(backend, store) if p != checkpoint.path]
    newer = quarantined_after(backend, others, checkpoint.generation)
    if newer is None:
        return verify_and_mark(checkpoint, progress)
    report = checkpoint.verify(progress)
    if report.problems and not report.unreadable:
        directories = [store, *map(os.path.dirname, checkpoint.parts)]
        refusal = two_in_a_row_message(checkpoint.path, newer, directories)
        raise DamagedError(f"{report.problems[0]}. {refusal}")
    return report


def two_in_a_row_message(damaged: str, newer: str, directories: Sequence[str]) -> str:
    """Return the message for a user if a second checkpoint in a row is damaged."""
    first, *parts = directories
    command = f"offload verify {first} --quarantine {part_options(parts)}".rstrip()
    return (
        f"{damaged} is not quarantined and not passed over, because {newer}, which was made after "
        "it, is quarantined already: two in a row point to the memory, a "
        "cable or the drive of this machine rather than to the checkpoints. Check the hardware "
        f"first (dmesg, a memory test). Then run `{command}`, on another machine if you can: it "
        "reads all checkpoints, marks what is damaged and lifts the marks of what is whole. After "
        "that start the program again: it continues from the newest checkpoint that is not marked"
    )


def quarantined_after(backend: Backend, paths: Iterable[str], generation: int) -> str | None:
    """Return the path of a quarantined checkpoint that is newer than a generation, or None.

    A checkpoint that cannot be read at this moment counts as quarantined and newer.
    """
    for path in paths:
        try:
            if read_quarantine(backend, path) is None:
                continue
            if decode_manifest(backend, path).generation > generation:
                return path
        except CheckpointError:
            continue  # its generation is unknown
        except StorageError:
            return path  # it may be quarantined, so the caller must mark nothing
    return None
