"""Measurement of one workload on a backend: rates, latencies, processor time, and data checks."""

from __future__ import annotations

import dataclasses
import math
import resource
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeAlias

import numpy as np

from gds.bench.link import link_meter
from gds.bench.stamps import Words
from gds.bench.target import Target
from gds.bench.workload import Workload
from gds.buffers.device import DeviceBuffer
from gds.buffers.host import HUGE_PAGE_BYTES
from gds.contract import ALIGNMENT, Backend, Buffer, File, IOFuture
from gds.errors import RefusedError
from gds.paths import PathName

OpenBackend: TypeAlias = Callable[[PathName, int], Backend]
"""Function that makes a backend for a path, with a number of threads in each direction."""

_Order: TypeAlias = list[tuple[int, bool]]
"""Requests of a pass in order: number of the block, and whether it is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Results of one run of a workload."""

    num_requests: int
    """Number of requests of all passes."""

    bytes_read: int
    """Bytes read in all passes."""

    bytes_written: int
    """Bytes written in all passes."""

    elapsed_s: float
    """Seconds from the start of the first request to the end of the last request, summed over all
    passes. Syncs, and the preparation of the page cache between passes, are not included."""

    sync_s: float
    """Seconds of the syncs after all passes; 0 if nothing was written."""

    latency_mean_s: float
    """Mean latency: seconds from the start of a request to its end. A wait for a thread of the
    backend is included; it occurs only if depth exceeds threads."""

    latency_p50_s: float
    """Median of the latency, in seconds."""

    latency_p99_s: float
    """99th percentile of the latency, in seconds."""

    latency_max_s: float
    """Largest latency, in seconds."""

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
    def num_bytes(self) -> int:
        """Bytes moved in both directions together."""
        return self.bytes_read + self.bytes_written

    @property
    def bytes_per_s(self) -> float:
        """Rate of reads and writes together in bytes per second, without the time of the syncs."""
        return self.num_bytes / self.elapsed_s if self.elapsed_s else math.inf

    @property
    def durable_bytes_per_s(self) -> float:
        """Rate of reads and writes together in bytes per second, with the time of the syncs."""
        whole_s = self.elapsed_s + self.sync_s
        return self.num_bytes / whole_s if whole_s else math.inf

    @property
    def iops(self) -> float:
        """Requests per second."""
        return self.num_requests / self.elapsed_s if self.elapsed_s else math.inf

    @property
    def cpu_cores(self) -> float:
        """Processor seconds per second; 1 is one core that is busy all the time."""
        used_s = self.cpu_user_s + self.cpu_system_s
        return used_s / self.elapsed_s if self.elapsed_s else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the results as JSON values. Later versions only add keys."""
        return {
            **dataclasses.asdict(self),
            "bytes_per_s": self.bytes_per_s,
            "durable_bytes_per_s": self.durable_bytes_per_s,
            "iops": self.iops,
            "cpu_cores": self.cpu_cores,
        }


def measure(
    workload: Workload,
    target: Target,
    open_backend: OpenBackend,
    *,
    verify: bool = False,
    seed: int = 0,
) -> Run:
    """Run a workload once.

    Args:
        workload: Requests to run.
        target: File to transfer to and from.
        open_backend: Function that makes the backend, which is closed afterwards.
        verify: Compare the data of all reads with the expected data, and read back all data after
            writes. The comparison takes processor time, so rates are lower than without it.
        seed: Seed of the random order of requests.

    Raises:
        RefusedError: The workload would write to, or verify, an existing file of the user.
        WrongDataError: A read returned other data than was written.
        StorageError: A transfer failed.
    """
    check_allowed(workload, target, verify=verify)
    generator = np.random.default_rng(seed)
    latencies = array("d")
    elapsed_s = sync_s = user_s = system_s = 0.0
    cached: float | None = None
    passes = verified = 0
    with (
        closing(open_backend(workload.path, workload.threads)) as backend,
        closing(link_meter(backend)) as meter,
    ):
        file = backend.open(target.path, writable=workload.writes)
        slots = _slots(backend, workload, target)
        while passes < workload.passes or elapsed_s < workload.seconds:
            order = _order(workload, generator)
            found = _prepare_cache(workload, target)
            cached = found if cached is None else max(cached, found or 0.0)
            one = _Pass(workload, file, target, slots, verify=verify)
            before = resource.getrusage(resource.RUSAGE_SELF)
            with meter.running():
                elapsed_s += one.run(order)
            after = resource.getrusage(resource.RUSAGE_SELF)
            user_s += after.ru_utime - before.ru_utime
            system_s += after.ru_stime - before.ru_stime
            latencies.extend(one.latencies)
            verified += one.verified_bytes
            passes += 1
            if workload.writes:
                started_s = time.perf_counter()
                file.sync()
                sync_s += time.perf_counter() - started_s
        direct = file.direct
        if verify and workload.writes:
            target.drop_cache()
            again = _Pass(workload, file, target, slots, verify=True)
            again.run([(block, True) for block in range(workload.num_requests)])
            verified += again.verified_bytes
    link = meter.use()
    ordered = np.sort(np.frombuffer(latencies))
    num_reads = workload.num_reads * passes
    num_writes = workload.num_requests * passes - num_reads
    return Run(
        num_requests=num_reads + num_writes,
        bytes_read=num_reads * workload.size,
        bytes_written=num_writes * workload.size,
        elapsed_s=elapsed_s,
        sync_s=sync_s,
        latency_mean_s=float(ordered.mean()),
        latency_p50_s=percentile(ordered, 50),
        latency_p99_s=percentile(ordered, 99),
        latency_max_s=float(ordered[-1]),
        cpu_user_s=user_s,
        cpu_system_s=system_s,
        pcie_rx_gbps=link.rx_gbps,
        pcie_tx_gbps=link.tx_gbps,
        pcie_samples=link.samples,
        pcie_reason=link.reason,
        direct=direct,
        cached_before=cached,
        verified_bytes=verified,
    )


def percentile(ordered: Sequence[float] | np.ndarray[Any, Any], percent: float) -> float:
    """Return a percentile: the smallest value that at least `percent` % of all do not exceed.

    Args:
        ordered: Values in ascending order; at least one.
        percent: Percentage, more than 0 and at most 100.
    """
    return float(ordered[max(math.ceil(len(ordered) * percent / 100), 1) - 1])


class _Pass:
    """One pass of a workload, which makes each request once."""

    def __init__(
        self,
        workload: Workload,
        file: File,
        target: Target,
        slots: Sequence[Buffer],
        *,
        verify: bool,
    ) -> None:
        """Prepare a pass.

        Args:
            workload: Workload of the pass.
            file: Open file to transfer to and from.
            target: The same file, with its expected content.
            slots: One buffer for each request in flight.
            verify: Whether to compare the data of reads with the expected data.
        """
        self._size = workload.size
        self._file = file
        self._target = target
        self._slots = slots
        self._verify = verify
        self._free: SimpleQueue[int] = SimpleQueue()
        self._pending: list[tuple[IOFuture, int, bool] | None] = [None] * len(slots)
        self._ended_s = [0.0] * len(slots)
        self.latencies = array("d")
        self.verified_bytes = 0

    def run(self, order: _Order) -> float:
        """Run requests, and return the seconds until the end of the last one.

        Args:
            order: Number of the block for each request, and whether to read it.
        """
        for slot in range(len(self._slots)):
            self._free.put(slot)
        started_s = time.perf_counter()
        for block, is_read in order:
            slot = self._free.get()
            self._settle(slot)
            self._start(slot, block * self._size, is_read=is_read)
        for _ in self._slots:
            self._settle(self._free.get())
        return max(self._ended_s) - started_s

    def _start(self, slot: int, offset: int, *, is_read: bool) -> None:
        """Start a request with the buffer of a slot."""
        buffer = self._slots[slot]
        if self._verify and not is_read:
            generations = self._target.generations_of(offset, self._size)
            generations += 1
            _fill(buffer, self._target, offset, generations)
        begun_s = time.perf_counter()
        move = self._file.read if is_read else self._file.write
        future = move(buffer, offset)
        self._pending[slot] = (future, offset, is_read)
        future.add_done_callback(partial(self._ended, slot, begun_s))

    def _ended(self, slot: int, begun_s: float, _: IOFuture) -> None:
        """Record the end of a slot's request, on the thread of the transfer."""
        now_s = time.perf_counter()
        self.latencies.append(now_s - begun_s)
        self._ended_s[slot] = now_s
        self._free.put(slot)

    def _settle(self, slot: int) -> None:
        """Take the result of the slot's last request, and verify the data of a read."""
        pending, self._pending[slot] = self._pending[slot], None
        if pending is None:
            return
        future, offset, is_read = pending
        future.result()
        if self._verify and is_read:
            generations = self._target.generations_of(offset, self._size)
            _compare(self._slots[slot], self._target, offset, generations)
            self.verified_bytes += self._size


def check_allowed(workload: Workload, target: Target, *, verify: bool) -> None:
    """Raise `RefusedError` if a workload would write to or verify an existing file of the user."""
    if target.made:
        return
    if workload.writes:
        raise RefusedError(
            f"{target.path} was not made by gds bench, which only reads such files: to write, "
            "name a directory, in which a scratch file is made"
        )
    if verify:
        raise RefusedError(
            f"--verify cannot check {target.path}, whose expected content is unknown: name a "
            "directory, in which a scratch file is made"
        )


def _slots(backend: Backend, workload: Workload, target: Target) -> list[Buffer]:
    """Return a buffer for each request in flight, cut from one allocation of whole huge pages."""
    wanted = workload.in_flight * workload.size
    memory = backend.allocate(-(-wanted // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES)
    slots = [memory.slice(n * workload.size, workload.size) for n in range(workload.in_flight)]
    for number, slot in enumerate(slots):  # touches all pages, with data that no drive compresses
        offset = number * workload.size
        generations = np.zeros(workload.size // ALIGNMENT, dtype=np.uint64)
        _fill(slot, target, offset, generations)
    return slots


def _fill(buffer: Buffer, target: Target, offset: int, generations: Words) -> None:
    """Fill a buffer with the data that belongs at `offset`; device memory gets a copy."""
    if isinstance(buffer, DeviceBuffer):
        data = bytearray(buffer.nbytes)
        target.stamps.fill(memoryview(data), offset, generations)
        buffer.upload(data)
    else:
        target.stamps.fill(buffer.memoryview(), offset, generations)


def _compare(buffer: Buffer, target: Target, offset: int, generations: Words) -> None:
    """Compare a buffer with the data that belongs at `offset`; device memory is copied to the host.

    Raises:
        WrongDataError: The buffer holds other data.
    """
    view = memoryview(
        buffer.download() if isinstance(buffer, DeviceBuffer) else buffer.memoryview()
    )
    target.stamps.check(view, offset, generations, target.path)


def _order(workload: Workload, generator: np.random.Generator) -> _Order:
    """Return the requests of a pass in order: number of the block, and whether it is read."""
    count = workload.num_requests
    blocks = generator.permutation(count) if workload.random else np.arange(count)
    is_read = np.arange(count) < workload.num_reads
    if workload.reads and workload.writes:
        is_read = generator.permutation(is_read)
    return list(zip(blocks.tolist(), is_read.tolist(), strict=True))


def _prepare_cache(workload: Workload, target: Target) -> float | None:
    """Bring the page cache into the state to measure; returns the share of the file that it holds.

    The result is None if the share is not known.
    """
    if workload.cache == "cold":
        target.sync()
        target.drop_cache()
    elif workload.cache == "warm":
        target.warm_cache()
    return target.cached()
