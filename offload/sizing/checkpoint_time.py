"""Time of a seal and of a resume: bytes at the rate of the drives, and parts that do not grow.

While a block is transferred, the next one is copied and digested on one core. If the rate of both
together has been measured, it counts for all blocks; otherwise the slower of both does. The faster
one counts for the block that has nothing beside it: the copy of the first block of a seal, or of
the last block of a resume. The first sync of a seal also flushes what the step before it has
written, as far as the drives have it in a cache. The module is pure arithmetic.
"""

from __future__ import annotations

from offload.format.manifest import MODEL_BLOCK_BYTES

SEAL_BEGIN_S = 0.002
"""Seconds until a seal copies its first byte: the hyper-parameters are copied, the manifest is
encoded, and a thread starts. The fastest of 15 seals of 128 Mi parameters on 2 virtual cores needed
1.8 ms."""

RESUME_BEGIN_S = 0.002
"""Seconds until a resume asks for its first byte: the manifest is compared with the model, and
files are opened. The fastest of 12 restores of 128 Mi parameters on 2 virtual cores needed
2.0 ms."""

FIRST_MEMORY_S = 0.002
"""Seconds in which the kernel makes the memory of a resume's first block, if its rate is not given:
2.1 ms on 2 virtual cores."""

RESUME_BLOCKS = 4
"""Blocks of memory through which a resume reads. All of them are new."""

RESUME_THREADS = 2
"""Threads that read in a resume. Both wait for the kernel to make the memory of their blocks, and
the drive has nothing to do meanwhile."""

_SLOT_SYNCS = 5
"""Syncs of a seal besides those of state arrays: of model file, train state and manifest, and of
the directories of the slot and of the store."""

_RECYCLING_SYNCS = 2
"""Syncs that make the oldest checkpoint a free slot: of the store's directory, and of the
manifest."""

_PART_SYNCS = 3
"""Syncs on each further drive besides those of state arrays: of ``part.json`` and of its directory,
and of the ``part.json`` of the oldest checkpoint."""


_BEGIN = "beginning"
_MEMORY = "new memory"


def num_seal_syncs(num_arrays: int, num_drives: int) -> int:
    """Return the number of syncs of files and directories in a seal that recycles a checkpoint."""
    first = num_arrays + _SLOT_SYNCS + _RECYCLING_SYNCS
    return first + (num_drives - 1) * (num_arrays + _PART_SYNCS)


def seal_parts(
    nbytes: float,
    *,
    drive_gbps: float | None,
    copy_gbps: float | None,
    staged_gbps: float | None = None,
    sync_s: float | None,
    num_syncs: int,
    flush_gbps: float | None = None,
    step_bytes: float = 0,
) -> dict[str, float]:
    """Return the seconds of each part of a seal; the parts follow each other.

    Args:
        nbytes: Bytes of the parameters.
        drive_gbps: Rate of writes to the drives in GB/s; not None if `staged_gbps` is None.
        copy_gbps: Rate in GB/s at which one core copies and digests parameters; None leaves the
            copies out.
        staged_gbps: Rate in GB/s of copies, digests and writes at the same time; None to take the
            slower of the other two rates.
        sync_s: Seconds of one sync; None leaves the syncs out. If the copies are left out as well,
            only writing is counted.
        num_syncs: Number of syncs.
        flush_gbps: Rate in GB/s at which a sync makes durable what the drives have in a cache; None
            if they have no cache that counts.
        step_bytes: Bytes that the step before the seal has written.
    """
    parts = _blocks(
        nbytes,
        drive_gbps,
        copy_gbps,
        staged_gbps,
        begin_s=SEAL_BEGIN_S,
        moved="writing",
        together="copying and writing",
        copied_alone="copying the first block",
        moved_alone="writing the last block",
    )
    if sync_s is not None:
        parts |= {_BEGIN: SEAL_BEGIN_S, "syncs": num_syncs * sync_s}
    if flush_gbps is not None:
        parts["flushing the step's writes"] = step_bytes / 1e9 / flush_gbps
    return parts


def resume_parts(
    nbytes: float,
    *,
    drive_gbps: float | None,
    copy_gbps: float | None,
    staged_gbps: float | None = None,
    new_memory_gbps: float | None = None,
) -> dict[str, float]:
    """Return the seconds of each part of a resume; the parts follow each other."""
    parts = _blocks(
        nbytes,
        drive_gbps,
        copy_gbps,
        staged_gbps,
        begin_s=RESUME_BEGIN_S,
        moved="reading",
        together="reading and copying",
        copied_alone="copying the last block",
        moved_alone="reading the first block",
    )
    if new_memory_gbps is not None:
        memory = min(nbytes, RESUME_BLOCKS * MODEL_BLOCK_BYTES) / 1e9
        parts |= {_BEGIN: RESUME_BEGIN_S, _MEMORY: memory / new_memory_gbps}
    elif _BEGIN in parts:
        parts[_BEGIN] += FIRST_MEMORY_S
    return parts


def _blocks(
    nbytes: float,
    drive_gbps: float | None,
    copy_gbps: float | None,
    staged_gbps: float | None,
    *,
    begin_s: float,
    moved: str,
    together: str,
    copied_alone: str,
    moved_alone: str,
) -> dict[str, float]:
    """Return the seconds of the slower of transfers and copies, and of a block without overlap."""
    block = min(nbytes, MODEL_BLOCK_BYTES)
    if staged_gbps is not None:
        parts = {together: nbytes / 1e9 / staged_gbps}
        if copy_gbps is not None:
            parts[copied_alone] = block / 1e9 / copy_gbps
        return parts | {_BEGIN: begin_s}
    if drive_gbps is None:
        raise ValueError("no rate of the drives is known")
    if copy_gbps is None:
        return {moved: nbytes / 1e9 / drive_gbps}
    if drive_gbps <= copy_gbps:
        parts = {moved: nbytes / 1e9 / drive_gbps, copied_alone: block / 1e9 / copy_gbps}
    else:
        parts = {"copying": nbytes / 1e9 / copy_gbps, moved_alone: block / 1e9 / drive_gbps}
    return parts | {_BEGIN: begin_s}
