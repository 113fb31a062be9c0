"""Limit on quarantine: one damaged checkpoint may be marked, but never two in a row.

A machine with bad memory finds damage in everything that it reads. Therefore `restore` and the
steps after it mark one checkpoint, and continue from the one before. If the earlier checkpoint is
found damaged as well, it is not marked. The process stops, and a person has to check the machine.
After that the person runs `offload verify --quarantine`, which reads every checkpoint, marks
damaged ones and lifts the marks of whole ones.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence

from gds import Backend, StorageError
from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.file_check import read_quarantine
from offload.checkpoint.reading import checkpoint_paths, decode_manifest
from offload.checkpoint.verify import VerifyReport
from offload.errors import CheckpointError, DamagedError
from offload.format.unreadable import reading
from offload.store.opening import StoredCheckpoint
from offload.store.quarantine import verify_and_mark
from offload.store.state_store import StateStore
from offload.units import part_options


def try_to_quarantine(store: StateStore, damaged: StoredCheckpoint, error: DamagedError) -> str:
    """Quarantine a damaged checkpoint, unless a newer one is quarantined already.

    Returns:
        Empty if the checkpoint has been quarantined; otherwise the reason why not, and advice.
    """
    refused = [path for path, _ in store.refused]
    newer = quarantined_after(store.backend, refused, damaged.manifest.generation)
    if newer is None:
        store.quarantine(damaged, str(error))
        return ""
    return two_in_a_row_message(damaged.path, newer, store.directories)


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
