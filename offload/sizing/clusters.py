"""Checkpoints of a run on many GPUs: who writes, how long copies take, and what a restore reads.

Copying systems save 16-bit parameters, masters and moments as a whole (14 bytes per parameter with
Adam). This library seals what is on its drives already, and writes the parameters alone.

The optimum is the first-order formula of Young ("A first order approximation to the optimum
checkpoint interval", 1974), which Daly's higher-order estimate (2006) approaches if checkpoints are
short beside the mean time to failure (MTTF).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from offload.sizing.checks import Field, FieldError, require_count, require_positive, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """GPUs of a run, and the storage that they share.

    Raises:
        SizingError: A value is not possible, or has no effect. The message says why.
    """

    gpus: int = 1

    tp: int = 1
    """Degree of tensor parallelism."""

    pp: int = 1
    """Degree of pipeline parallelism."""

    sharded: bool = False
    """Whether data parallelism shards the optimizer (ZeRO, FSDP). If it replicates it, one
    replica writes the checkpoint."""

    storage_gbps: float | None = None
    """Rate of writes to the shared storage in GB/s, all writers together; None if checkpoints are
    copied to the drives of each writer."""

    storage_read_gbps: float | None = None
    """Rate of reads from the shared storage in GB/s, all readers together; None for
    `storage_gbps`."""

    writer_gbps: float | None = None
    """Largest rate of one writer in GB/s; None if only the storage bounds it."""

    efficiency: float = 1.0
    """Share of the storage's peak rate that checkpoints reach."""

    gpus_per_node: int = 8

    def __post_init__(self) -> None:
        """Check the values."""
        for name in ("gpus", "tp", "pp", "gpus_per_node"):
            require_count(name, getattr(self, name))
        for field in fields(self):
            if field.name.endswith("gbps"):
                require_positive(field.name, getattr(self, field.name))
        require_positive("efficiency", self.efficiency)
        if self.efficiency > 1:
            raise FieldError(
                Field("efficiency"), f" is {shown(self.efficiency)}, expected at most 1"
            )
        for name, given in (
            ("writer_gbps", self.writer_gbps is not None),
            ("efficiency", self.efficiency < 1),
        ):
            if given and self.storage_gbps is None:
                raise FieldError(
                    Field(name),
                    " is about shared storage and needs its rate: give ",
                    Field("storage_gbps"),
                    " as well",
                )
        if self.gpus % (self.tp * self.pp):
            raise FieldError(
                f"{self.gpus} GPUs cannot be divided into replicas of {self.tp} x {self.pp} GPUs (",
                Field("tp"),
                " x ",
                Field("pp"),
                ")",
            )

    @property
    def replicas(self) -> int:
        """Number of model replicas: the degree of data parallelism."""
        return self.gpus // (self.tp * self.pp)

    @property
    def writers(self) -> int:
        """Number of processes that write a part of a checkpoint each."""
        return self.gpus if self.sharded else self.tp * self.pp

    @property
    def write_gbps(self) -> float | None:
        """Rate in GB/s at which all writers write; None if no shared storage is given."""
        if self.storage_gbps is None or self.writer_gbps is None:
            return self.storage_gbps
        return min(self.storage_gbps, self.writers * self.writer_gbps)


@dataclass(frozen=True, slots=True)
class Copies:
    """One way of making checkpoints, and its cost for one checkpoint."""

    name: str
    written_bytes: float
    """Bytes written to storage."""

    link_bytes: float
    """Bytes that cross the links between GPUs and hosts."""

    host_bytes: float
    """Bytes of host memory that hold the checkpoint until it is written."""

    stall_s: float | None
    """Seconds for which training stands still."""

    durable_s: float | None
    """Seconds until the checkpoint is on the storage that it is meant for."""

    fills_memory_s: float | None = None
    """Seconds until waiting copies fill the host memory; infinity if they never do. None if
    interval, storage or memory is not given."""


def copies_of(
    checkpoint_bytes: float,
    parameter_bytes: float,
    cluster: Cluster,
    *,
    link_gbps: float | None,
    drive_gbps: float | None,
    seal_s: float | None,
    stall_s: float,
    interval_s: float | None,
    host_memory: float | None,
) -> list[Copies]:
    """Return the cost of a checkpoint made by full copy, asynchronously, by tiers, and in place.

    Copies are made by the writers alone. In place, each rank seals its share on its own drives.

    Args:
        checkpoint_bytes: Bytes of parameters, masters and moments of the whole model.
        parameter_bytes: Bytes of the 16-bit parameters of the whole model.
        cluster: GPUs and shared storage.
        link_gbps: Rate in GB/s of the link from one GPU to its host.
        drive_gbps: Rate in GB/s of writes to the drives of one rank.
        seal_s: Seconds of a seal in place.
        stall_s: Seconds for which a seal in place stops training.
        interval_s: Seconds from one checkpoint to the next.
        host_memory: Bytes of memory for waiting copies of each writer.
    """
    # The writers copy over their own links, and to their own drives, at the same time.
    local = drive_gbps and drive_gbps * cluster.writers
    storage = cluster.write_gbps or local
    on_storage = _seconds(checkpoint_bytes, storage)
    copied = _seconds(checkpoint_bytes, link_gbps and link_gbps * cluster.writers)
    fills = None
    if interval_s is not None and storage is not None and host_memory is not None:
        memory = host_memory * cluster.writers
        fills = memory_fills_after(checkpoint_bytes, interval_s, storage, memory)
    on_drives = _seconds(checkpoint_bytes, local)
    full = on_storage if on_storage is None or copied is None else max(on_storage, copied)
    return [
        Copies("full copy", checkpoint_bytes, checkpoint_bytes, 0, full, full),
        Copies(
            "asynchronous copy",
            checkpoint_bytes,
            checkpoint_bytes,
            checkpoint_bytes,
            copied,
            _sum(copied, on_storage),
            fills,
        ),
        Copies(
            "hierarchical copy",
            2 * checkpoint_bytes,
            checkpoint_bytes,
            checkpoint_bytes,
            copied,
            _sum(copied, on_drives, on_storage),
        ),
        Copies(
            "in place (this library)",
            parameter_bytes,
            parameter_bytes,
            0,
            stall_s,
            seal_s,
        ),
    ]


@dataclass(frozen=True, slots=True)
class Restores:
    """Bytes and seconds of restoring all replicas of a model from storage."""

    replicas: int
    each_bytes: float
    """Bytes read if every replica reads a whole checkpoint."""

    each_s: float | None
    once_s: float | None
    """Seconds if one replica reads the checkpoint and sends it to the others."""

    parameters_bytes: float
    """Bytes read if every replica reads the 16-bit parameters alone, as this library does."""

    parameters_s: float | None
    parameters_once_s: float | None

    equal_time_gbps: float | None
    """Rate of reads in GB/s with which a restore by every replica takes as long as a write."""


def restores_of(
    checkpoint_bytes: float,
    parameter_bytes: float,
    cluster: Cluster,
    *,
    drive_read_gbps: float | None,
) -> Restores:
    """Return the cost of restoring all replicas."""
    shared = cluster.storage_read_gbps or cluster.storage_gbps
    rate = shared or (drive_read_gbps and drive_read_gbps * cluster.writers)
    in_place = shared if drive_read_gbps is None else drive_read_gbps * cluster.gpus
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


def _seconds(nbytes: float, gbps: float | None) -> float | None:
    return None if gbps is None else nbytes / 1e9 / gbps


def _sum(*times: float | None) -> float | None:
    known = [time for time in times if time is not None]
    return sum(known) if len(known) == len(times) else None


def overhead(stall_s: float, interval_s: float) -> float:
    """Return the share of an interval of training that a checkpoint's stall adds to it.

    Args:
        stall_s: Seconds for which training stands still for one checkpoint.
        interval_s: Seconds of training from one checkpoint to the next.
    """
    return stall_s / interval_s


def interval_for(stall_s: float, budget: float) -> float:
    """Return the shortest interval in seconds whose overhead is within a budget."""
    return stall_s / budget


def optimal_interval(stall_s: float, mttf_s: float) -> float:
    """Return the interval in seconds that wastes the least time: ``sqrt(2 * stall * MTTF)``."""
    return math.sqrt(2 * stall_s * mttf_s)


def waste(stall_s: float, interval_s: float, mttf_s: float) -> float:
    """Return the share of time that is lost: in checkpoints, and in work that failures undo.

    A failure undoes half an interval on average. The time of restarts is not in it.

    Args:
        stall_s: Seconds for which training stands still for one checkpoint.
        interval_s: Seconds of training from one checkpoint to the next.
        mttf_s: Mean time to failure of the whole run, in seconds.
    """
    return stall_s / interval_s + interval_s / (2 * mttf_s)


def memory_fills_after(
    copy_bytes: float, interval_s: float, storage_gbps: float, memory_bytes: float
) -> float:
    """Return the seconds until copies that wait for storage fill the memory; infinity if never."""
    growth = copy_bytes / interval_s - storage_gbps * 1e9
    return memory_bytes / growth if growth > 0 else math.inf
