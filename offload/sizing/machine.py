"""Hardware that a plan is made for: drives, links, memory and the GPUs of a run."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Any

from offload.errors import SizingError
from offload.format.strict_json import parse_json
from offload.sizing.checks import read_regular, require_positive

_MAX_BENCH_BYTES = 16 << 20
_MAX_BENCH_VALUES = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Rates and sizes of the machine that one process (rank) trains on.

    All rates are in gigabytes (1e9 bytes) per second, and are those of one rank. None means that
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


def measured_drives(path: str | os.PathLike[str]) -> dict[str, float]:
    """Return the rates of a drive that ``gds bench --json`` has measured, as fields of `Machine`.

    The largest rate of each direction is taken, because a store measures which requests suit the
    drive.

    Args:
        path: File with the output of ``gds bench DIRECTORY --sweep rw=read,write,mixed --json``.

    Raises:
        SizingError: The file cannot be read, or is not such an output.
    """
    path = os.fspath(path)
    content = read_regular(path, _MAX_BENCH_BYTES)
    try:
        rates = _rates(parse_json(content, max_values=_MAX_BENCH_VALUES))
    except (ValueError, KeyError, TypeError) as error:
        raise SizingError(f"{path}: not an output of `gds bench --json`: {error!r}") from error
    if not rates:
        raise SizingError(f"{path}: no read, write or mixed rate was measured in it")
    return rates


def _rates(report: Any) -> dict[str, float]:
    found: dict[str, float] = {}
    for result in report["results"]:
        workload = result["workload"]
        if workload["rw"] in ("read", "write", "mixed") and workload["mix"] == 50:
            name = f"{workload['rw']}_gbps"
            rate = result["median"]["bytes_per_s"] / 1e9
            found[name] = max(rate, found.get(name, 0.0))
    return found
