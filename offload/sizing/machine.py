"""Hardware that a plan is made for: drives, links, memory and the GPUs of a run."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from offload.errors import SizingError
from offload.format.strict_json import parse_json
from offload.sizing.checks import read_regular, require_positive

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
    """Bytes of host memory of one rank for copies that wait for storage."""

    drive_tbw: float | None = None
    """Bytes that all drives of one rank together may be written with in their lives (the sum of
    their ratings "TBW")."""

    def __post_init__(self) -> None:
        """Check that every value is a positive number."""
        for field in fields(self):
            require_positive(field.name, getattr(self, field.name))

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
    try:
        best = _best_results(parse_json(content, max_values=_MAX_BENCH_VALUES))
        rates = {f"{name}_gbps": _rate(result) for name, result in best.items()}
        found = MeasuredDrives(
            rates | _flush_rate(best),
            [
                f"{name.replace('_', ' ')}: {reason}"
                for name, result in best.items()
                for reason in result.get("verdict_reasons", ())
            ],
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SizingError(f"{path}: not an output of `gds bench --json`: {error!r}") from error
    if not found.rates:
        raise SizingError(f"{path}: no read, write or mixed rate was measured in it")
    return found


def _best_results(report: Any) -> dict[str, Any]:
    """Return the result with the largest rate of each kind, by ``rw``, or "staged_" and ``rw``."""
    found: dict[str, Any] = {}
    for result in report["results"]:
        workload = result["workload"]
        rw = workload["rw"]
        if rw not in ("read", "write", "mixed") or workload["mix"] != 50:
            continue
        if workload["path"] == "buffered":
            continue
        name = f"staged_{rw}" if workload.get("staged") else rw
        if name not in found or _rate(result) > _rate(found[name]):
            found[name] = result
    return found


def _flush_rate(best: dict[str, Any]) -> dict[str, float]:
    """Return the rate of the syncs after plain writes: written bytes by the seconds of syncs."""
    if "write" not in best:
        return {}
    found = best["write"]["median"]
    written, durable = found["bytes_per_s"], found.get("durable_bytes_per_s", found["bytes_per_s"])
    sync_s_per_byte = 1 / durable - 1 / written
    return {"flush_gbps": 1 / sync_s_per_byte / 1e9} if sync_s_per_byte > 0 else {}


def _rate(result: Any) -> float:
    """Return the rate of a result in GB/s; of staged writes with their syncs, as a seal makes."""
    workload = result["workload"]
    durable = workload.get("staged") and workload["rw"] == "write"
    rate: float = result["median"]["durable_bytes_per_s" if durable else "bytes_per_s"] / 1e9
    return rate
