"""Results of one run of a workload: rates and latencies of each direction, and a time series."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from gds.bench.latency import Latency
from gds.bench.series import Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """Requests of a run: those of one direction, or of both together."""

    num_requests: int
    """Number of requests."""

    num_bytes: int
    """Bytes moved."""

    elapsed_s: float
    """Measured seconds of the run, whatever the direction."""

    latency: Latency
    """Latencies of the requests."""

    @property
    def bytes_per_s(self) -> float:
        """Rate in bytes per second, without the time of the syncs."""
        return self.num_bytes / self.elapsed_s if self.elapsed_s else math.inf

    @property
    def iops(self) -> float:
        """Requests per second."""
        return self.num_requests / self.elapsed_s if self.elapsed_s else math.inf

    def to_json(self) -> dict[str, Any]:
        """Return the results as JSON values. Later versions only add keys."""
        return {
            "num_requests": self.num_requests,
            "num_bytes": self.num_bytes,
            "bytes_per_s": self.bytes_per_s,
            "iops": self.iops,
            **self.latency.to_json(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Results of one run of a workload."""

    total: Requests
    """All requests of all passes."""

    reads: Requests | None
    """Reads of all passes; None if the workload has none."""

    writes: Requests | None
    """Writes of all passes; None if the workload has none."""

    lane_bytes_per_s: tuple[float, ...]
    """Rate of each directory in bytes per second, each until the end of its own last request; the
    mean over all passes. For a single directory it is the rate of the run."""

    intervals: tuple[Interval, ...]
    """Time series of the run, in order."""

    elapsed_s: float
    """Seconds from the start of the first request to the end of the last request, summed over all
    passes. Syncs, the ramp, and the preparation of the page cache between passes, are not
    included."""

    ramp_s: float
    """Seconds of the requests before the measured time, which count nowhere else."""

    sync_s: float
    """Seconds of the syncs after all passes; 0 if nothing was written."""

    cpu_user_s: float
    """Processor seconds in user mode during `elapsed_s`, all threads of this process."""

    cpu_system_s: float
    """Processor seconds in the kernel during `elapsed_s`, all threads of this process."""

    pcie_rx_gbps: float | None
    """Traffic in GB/s that the GPU received over PCIe during `elapsed_s`, from any sender; None if
    it cannot be read. See `gds.bench.link`."""

    pcie_tx_gbps: float | None
    """Traffic in GB/s that the GPU sent over PCIe; None if it cannot be read."""

    pcie_samples: int
    """Number of samples of 20 ms in the mean of the PCIe traffic."""

    pcie_reason: str
    """Reason, for people, why the PCIe traffic cannot be read; empty if it can."""

    direct: bool
    """Whether the transfers bypassed the page cache."""

    cached_before: float | None
    """Share of the file that the page cache held before a pass; the largest value of all passes, or
    None if it is not known."""

    verified_bytes: int
    """Bytes that were compared with the expected data; 0 without verification."""

    @property
    def bytes_read(self) -> int:
        """Bytes read in all passes."""
        return self.reads.num_bytes if self.reads else 0

    @property
    def bytes_written(self) -> int:
        """Bytes written in all passes."""
        return self.writes.num_bytes if self.writes else 0

    @property
    def num_bytes(self) -> int:
        """Bytes moved in both directions together."""
        return self.total.num_bytes

    @property
    def bytes_per_s(self) -> float:
        """Rate of reads and writes together in bytes per second, without the time of the syncs."""
        return self.total.bytes_per_s

    @property
    def durable_bytes_per_s(self) -> float:
        """Rate of reads and writes together in bytes per second, with the time of the syncs."""
        whole_s = self.elapsed_s + self.sync_s
        return self.num_bytes / whole_s if whole_s else math.inf

    @property
    def cpu_cores(self) -> float:
        """Processor seconds per second; 1 is one core that is busy all the time."""
        used_s = self.cpu_user_s + self.cpu_system_s
        return used_s / self.elapsed_s if self.elapsed_s else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the results as JSON values. Later versions only add keys."""
        parts = ("total", "reads", "writes", "intervals")
        plain = {name: getattr(self, name) for name in self.__slots__ if name not in parts}
        return {
            **plain,
            **self.total.to_json(),
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "durable_bytes_per_s": self.durable_bytes_per_s,
            "cpu_cores": self.cpu_cores,
            "reads": self.reads.to_json() if self.reads else None,
            "writes": self.writes.to_json() if self.writes else None,
            "series": [dataclasses.asdict(interval) for interval in self.intervals],
        }
