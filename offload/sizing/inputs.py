"""What a plan is made for: the machine of one rank, the GPUs of the run, and the run itself."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from offload.errors import SizingError
from offload.format.strict_json import parse_json
from offload.sizing.checks import (
    FieldError,
    read_regular,
    require_count,
    require_positive,
)

STALL_S = 0.02
"""Seconds for which a seal in place stops training, if nothing else is given. The recorded median
is a tenth of it."""

_MAX_BENCH_BYTES = 16 << 20
_MAX_BENCH_VALUES = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Rates and sizes of the machine that one process (rank) trains on.

    Rates are in gigabytes (1e9 bytes) per second, and are those of one rank. None means that
    the value is not known; what depends on it is then left out.

    Raises:
        SizingError: A value is not a positive number.
    """

    read_gbps: float | None = None
    """Rate of reads from the drives, if nothing is written."""

    write_gbps: float | None = None
    """Rate of writes to the drives, if nothing is read."""

    mixed_gbps: float | None = None
    """Rate of reads and writes of equal size at the same time, both added up."""

    update_gbps: float | None = None
    """Rate of updates on the CPU: bytes of state read and written, both added up."""

    copy_gbps: float | None = None
    """Rate at which one core copies and digests parameters in a seal or a resume."""

    staged_read_gbps: float | None = None
    """Rate at which blocks are read from the drives while one core digests and copies others, as
    in a resume. It replaces `read_gbps` there, which is measured with nothing beside it."""

    staged_write_gbps: float | None = None
    """Rate at which blocks are written to the drives, and become durable, while one core copies
    and digests others, as in a seal. It replaces `write_gbps` there."""

    new_memory_gbps: float | None = None
    """Rate at which the kernel makes memory that two threads of a process touch for the first time.
    A resume reads into such memory."""

    sync_s: float | None = None
    """Seconds of one sync of a file after a small write. A seal makes several."""

    flush_gbps: float | None = None
    """Rate at which a sync makes data durable that has just been written, and that the drives have
    in a cache. A seal that follows a step at once flushes what the step has written."""

    link_gbps: float | None = None
    """Rate of the link between GPU and host in each direction."""

    network_gbps: float | None = None
    """Rate of the network to a server next to the storage, in each direction."""

    gpu_memory: float | None = None
    """Bytes of memory of one GPU."""

    host_memory: float | None = None
    """Bytes of host memory of one rank, for gradients and parameters outside of the GPU, or for
    copies that wait for storage."""

    drive_tbw: float | None = None
    """Bytes that all drives of one rank together may be written with in their lives (the sum of
    their ratings "TBW")."""

    def __post_init__(self) -> None:
        """Check that every value is a positive number."""
        _require_in_range(self)

    @property
    def both_ways_gbps(self) -> float | None:
        """Rate of reads and writes of equal size at the same time, both added up.

        It is bounded by the rate of each direction alone, and by the mixed rate if it is known.
        None if neither the mixed rate nor both directions are known.
        """
        one_way = [2 * rate for rate in (self.read_gbps, self.write_gbps) if rate is not None]
        if self.mixed_gbps is not None:
            return min([*one_way, self.mixed_gbps])
        return min(one_way) if len(one_way) == 2 else None

    def drives_s(self, read_bytes: float, written_bytes: float) -> float | None:
        """Return the seconds in which the drives read and write at the same time.

        None if neither the mixed rate nor both directions are known.
        """
        if self.both_ways_gbps is None:
            return None
        both = (read_bytes + written_bytes, self.mixed_gbps)
        parts = [both, (read_bytes, self.read_gbps), (written_bytes, self.write_gbps)]
        return max(nbytes / 1e9 / rate for nbytes, rate in parts if rate is not None)


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

    def __post_init__(self) -> None:
        """Check the values."""
        _require_in_range(self)
        if self.efficiency > 1:
            raise FieldError(f"{{efficiency}} is {self.efficiency!r}, expected at most 1")
        for name, given in (
            ("writer_gbps", self.writer_gbps is not None),
            ("efficiency", self.efficiency < 1),
        ):
            if given and self.storage_gbps is None:
                raise FieldError(
                    f"{{{name}}} is about shared storage and needs its rate: give {{storage_gbps}} "
                    "as well"
                )
        if self.gpus % (self.tp * self.pp):
            raise FieldError(
                f"{self.gpus} GPUs cannot be divided into replicas of {self.tp} x {self.pp} GPUs "
                "({tp} x {pp})"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What is known about a training run besides the model and the hardware.

    Raises:
        SizingError: A value is not a positive number, or another value that it needs is missing.
    """

    keep: int = 2
    """Number of sealed checkpoints that the store keeps."""

    interval_s: float | None = None
    """Seconds from one checkpoint to the next."""

    budget: float | None = None
    """Largest share of time that checkpoints may add, such as 0.05."""

    mttf_s: float | None = None
    """Mean time to failure of the whole run, in seconds."""

    stall_s: float = STALL_S
    """Seconds for which a seal in place stops training."""

    iteration_s: float | None = None
    """Seconds from one optimizer step to the next; None for the step's own time."""

    micro_batches: int = 1
    """Number of forward and backward passes whose gradients one step adds up."""

    forward_s: float | None = None
    """Seconds of a forward pass, beside which a step may run."""

    backward_s: float | None = None
    """Seconds of a backward pass, beside which a step may run too; needs `forward_s`."""

    tokens: float | None = None
    """Number of tokens that the model is trained on."""

    tflops: float | None = None
    """Rate of one GPU in training, in 1e12 operations per second."""

    upload_s: float | None = None
    """Seconds that a copy of a checkpoint to a remote tier takes; needs `interval_s`."""

    def __post_init__(self) -> None:
        """Check the values."""
        _require_in_range(self)
        if self.backward_s is not None and self.forward_s is None:
            raise FieldError(
                "{backward_s} needs {forward_s}: a step that runs beside backward runs beside the "
                "next forward too"
            )


def _require_in_range(settings: Machine | Cluster | Run) -> None:
    """Refuse a count or another number that is not possible, by the types of the fields."""
    for field in fields(settings):
        value = getattr(settings, field.name)
        if field.type == "int":
            require_count(field.name, value)
        elif field.type != "bool":
            require_positive(field.name, value)


class MeasuredDrives(NamedTuple):
    """Rates that ``gds bench`` has measured."""

    rates: dict[str, float]
    """Rates in GB/s, as fields of `Machine`: ``read_gbps``, ``write_gbps``, ``mixed_gbps``,
    ``flush_gbps``, ``staged_read_gbps`` and ``staged_write_gbps``, as far as they were measured."""

    doubts: list[str]
    """Reasons, as text for people, not to trust a rate: what ``gds bench`` says of its runs."""


def measured_drives(path: str | os.PathLike[str]) -> MeasuredDrives:
    """Return the rates of a drive that ``gds bench --json`` has measured.

    The largest rate of each direction is taken, because a store measures which requests suit the
    drive. Rates through the page cache do not count.

    Args:
        path: File with the output of ``gds bench DIRECTORY --sweep rw=read,write,mixed --json``, or
            of ``gds bench DIRECTORY --staged --sweep rw=read,write --json``.

    Raises:
        SizingError: The file cannot be read, or is not such an output.
    """
    path = os.fsdecode(path)
    content = read_regular(path, _MAX_BENCH_BYTES)
    best: dict[str, Any] = {}
    rates: dict[str, float] = {}
    try:
        for result in parse_json(content, max_values=_MAX_BENCH_VALUES)["results"]:
            workload = result["workload"]
            kind = workload["rw"]
            if kind not in ("read", "write", "mixed") or workload["mix"] != 50:
                continue
            if workload["path"] == "buffered":
                continue
            # Staged writes count with their syncs, as a seal makes them.
            staged = workload.get("staged")
            name = f"staged_{kind}" if staged else kind
            durable = "durable_" if name == "staged_write" else ""
            rate = result["median"][f"{durable}bytes_per_s"] / 1e9
            if name not in best or rate > rates[f"{name}_gbps"]:
                best[name], rates[f"{name}_gbps"] = result, rate
        if "write" in best:
            rates |= _flush_rate(best["write"]["median"])
        doubts = [
            f"{name.replace('_', ' ')}: {reason}"
            for name, result in best.items()
            for reason in result.get("verdict_reasons", ())
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SizingError(f"{path}: not an output of `gds bench --json`: {error!r}") from error
    if not rates:
        raise SizingError(f"{path}: no read, write or mixed rate was measured in it")
    return MeasuredDrives(rates, doubts)


def _flush_rate(median: Any) -> dict[str, float]:
    """Return the rate of the syncs after plain writes: written bytes by the seconds of syncs."""
    written = median["bytes_per_s"]
    sync_s_per_byte = 1 / median.get("durable_bytes_per_s", written) - 1 / written
    return {"flush_gbps": 1 / sync_s_per_byte / 1e9} if sync_s_per_byte > 0 else {}
