"""Times of checkpoints and restores: in place, and as copying systems make them. Pure arithmetic.

In place, a block is transferred while the next one is copied and digested on one core. If the rate
of both together has been measured, it counts for all blocks; otherwise the slower of both does. The
faster one counts for the block that has nothing beside it.

Copying systems save 16-bit parameters, masters and moments as a whole (14 bytes per parameter with
Adam). This library seals what is on its drives already, and writes the parameters alone.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from offload.format.digests import MODEL_BLOCK_BYTES
from offload.sizing.figures import Copies, Interval, Restores
from offload.sizing.inputs import Cluster, Machine, Run

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


class _Words(NamedTuple):
    """Names of the parts of a transfer of blocks."""

    moved: str
    together: str
    copied_alone: str
    moved_alone: str


_SEAL = _Words(
    "writing", "copying and writing", "copying the first block", "writing the last block"
)
_RESUME = _Words(
    "reading", "reading and copying", "copying the last block", "reading the first block"
)


def num_seal_syncs(num_arrays: int, num_drives: int) -> int:
    """Return the number of syncs of files and directories in a seal that recycles a checkpoint."""
    first = num_arrays + _SLOT_SYNCS + _RECYCLING_SYNCS
    return first + (num_drives - 1) * (num_arrays + _PART_SYNCS)


def seal_parts(
    nbytes: float, machine: Machine, *, num_syncs: int, step_bytes: float
) -> dict[str, float] | None:
    """Return the seconds of each part of a seal, one after the other; None without a rate.

    The first sync also flushes what the step before has written, as far as drives cache it.

    Args:
        nbytes: Bytes of the parameters.
        machine: Rates of the rank.
        num_syncs: Number of syncs.
        step_bytes: Bytes that the step before the seal has written.
    """
    parts = _blocks(
        nbytes,
        machine.write_gbps,
        machine.staged_write_gbps,
        machine.copy_gbps,
        SEAL_BEGIN_S,
        _SEAL,
    )
    if parts is None:
        return None
    if machine.sync_s is not None:
        parts |= {_BEGIN: SEAL_BEGIN_S, "syncs": num_syncs * machine.sync_s}
    if machine.flush_gbps is not None:  # what the drives still have of the step in a cache
        parts["flushing the step's writes"] = step_bytes / 1e9 / machine.flush_gbps
    return parts


def resume_parts(nbytes: float, machine: Machine) -> dict[str, float] | None:
    """Return the seconds of each part of a resume, one after the other; None without a rate."""
    parts = _blocks(
        nbytes,
        machine.read_gbps,
        machine.staged_read_gbps,
        machine.copy_gbps,
        RESUME_BEGIN_S,
        _RESUME,
    )
    if parts is None:
        return None
    if machine.new_memory_gbps is not None:
        memory = min(nbytes, RESUME_BLOCKS * MODEL_BLOCK_BYTES) / 1e9
        parts |= {_BEGIN: RESUME_BEGIN_S, "new memory": memory / machine.new_memory_gbps}
    elif _BEGIN in parts:
        parts[_BEGIN] += FIRST_MEMORY_S
    return parts


def _blocks(
    nbytes: float,
    drive_gbps: float | None,
    staged_gbps: float | None,
    copy_gbps: float | None,
    begin_s: float,
    words: _Words,
) -> dict[str, float] | None:
    """Return the seconds of the slower of transfers and copies, and of a block without overlap.

    Without a rate of copies, transfers alone are counted.
    """
    block = min(nbytes, MODEL_BLOCK_BYTES)
    if staged_gbps is not None:
        parts = {words.together: nbytes / 1e9 / staged_gbps}
        if copy_gbps is not None:
            parts[words.copied_alone] = block / 1e9 / copy_gbps
    elif drive_gbps is None:
        return None
    elif copy_gbps is None:
        return {words.moved: nbytes / 1e9 / drive_gbps}
    elif drive_gbps <= copy_gbps:
        parts = {
            words.moved: nbytes / 1e9 / drive_gbps,
            words.copied_alone: block / 1e9 / copy_gbps,
        }
    else:
        parts = {
            "copying": nbytes / 1e9 / copy_gbps,
            words.moved_alone: block / 1e9 / drive_gbps,
        }
    return parts | {_BEGIN: begin_s}


def copies_of(
    checkpoint_bytes: float,
    parameter_bytes: float,
    cluster: Cluster,
    machine: Machine,
    run: Run,
    seal_s: float | None,
) -> list[Copies]:
    """Return the cost of a checkpoint made by full copy, asynchronously, by tiers, and in place.

    Copies are made by the writers alone. In place, each rank seals its share on its own drives.
    """
    # The writers copy over their own links, and to their own drives, at the same time.
    writers = cluster.writers
    drives = machine.write_gbps and machine.write_gbps * writers
    storage = cluster.write_gbps or drives
    on_drives, on_storage = _seconds(checkpoint_bytes, drives), _seconds(checkpoint_bytes, storage)
    copied = _seconds(checkpoint_bytes, machine.link_gbps and machine.link_gbps * writers)
    fills = None
    if run.interval_s is not None and storage is not None and machine.host_memory is not None:
        growth = checkpoint_bytes / run.interval_s - storage * 1e9
        fills = machine.host_memory * writers / growth if growth > 0 else math.inf
    full = on_storage if on_storage is None or copied is None else max(on_storage, copied)
    copy = checkpoint_bytes
    return [
        Copies("full copy", copy, copy, 0, full, full),
        Copies("asynchronous copy", copy, copy, copy, copied, _sum(copied, on_storage), fills),
        Copies(
            "hierarchical copy", 2 * copy, copy, copy, copied, _sum(copied, on_drives, on_storage)
        ),
        Copies("in place (this library)", parameter_bytes, parameter_bytes, 0, run.stall_s, seal_s),
    ]


def restores_of(
    checkpoint_bytes: float, parameter_bytes: float, cluster: Cluster, read_gbps: float | None
) -> Restores:
    """Return the cost of restoring all replicas; `read_gbps` is that of one rank's drives."""
    shared = cluster.storage_read_gbps or cluster.storage_gbps
    rate = shared or (read_gbps and read_gbps * cluster.writers)
    in_place = shared if read_gbps is None else read_gbps * cluster.gpus
    written = cluster.write_gbps
    return Restores(
        cluster.replicas,
        cluster.replicas * checkpoint_bytes,
        _seconds(cluster.replicas * checkpoint_bytes, rate),
        _seconds(checkpoint_bytes, rate),
        cluster.replicas * parameter_bytes,
        _seconds(cluster.replicas * parameter_bytes, in_place),
        _seconds(parameter_bytes, in_place),
        written and written * cluster.replicas,
    )


def interval_of(name: str, stall_s: float, run: Run) -> Interval:
    """Return the intervals of checkpoints that stop training for `stall_s` each.

    The optimum is the first-order formula of Young ("A first order approximation to the optimum
    checkpoint interval", 1974), which Daly's higher-order estimate (2006) approaches if checkpoints
    are short beside the mean time to failure (MTTF). A failure undoes half an interval on average;
    the time of restarts is not in it.
    """
    added = None if run.interval_s is None else stall_s / run.interval_s
    optimal = waste = None
    if run.mttf_s is not None:
        optimal = math.sqrt(2 * stall_s * run.mttf_s)
        waste = stall_s / optimal + optimal / (2 * run.mttf_s)
    return Interval(
        name,
        stall_s,
        added,
        None if added is None else added / (1 + added),
        None if run.budget is None else stall_s / run.budget,
        optimal,
        waste,
    )


def _seconds(nbytes: float, gbps: float | None) -> float | None:
    return None if gbps is None else nbytes / 1e9 / gbps


def _sum(*times: float | None) -> float | None:
    known = [time for time in times if time is not None]
    return sum(known) if len(known) == len(times) else None
