"""Measurement of one workload on a backend: rates, latencies, processor time, and data checks."""

from __future__ import annotations

import math
import resource
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeAlias

import numpy as np

from gds.bench.latency import latency_of
from gds.bench.link import link_meter
from gds.bench.result import Requests, Run
from gds.bench.series import Series
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

Values: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
"""Array of numbers, dtype float64."""

_Order: TypeAlias = list[tuple[int, bool]]
"""Requests of a pass in order: number of the block, and whether it is read."""


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
    collected = _Collected(workload)
    ramp_s = sync_s = user_s = system_s = 0.0
    cached: float | None = None
    verified = 0
    with (
        closing(open_backend(workload.path, workload.threads)) as backend,
        closing(link_meter(backend)) as meter,
    ):
        file = backend.open(target.path, writable=workload.writes)
        slots = _slots(backend, workload, target)
        while ramp_s < (0.0 if workload.cache == "as-is" else workload.ramp_s):
            _prepare_cache(workload, target)
            one = _Pass(workload, file, target, slots, verify=verify)
            ramp_s += one.run(_order(workload, generator), limit_s=workload.ramp_s - ramp_s)
            if workload.writes:
                file.sync()
        while collected.passes < workload.passes or collected.elapsed_s < workload.seconds:
            order = _order(workload, generator)
            found = _prepare_cache(workload, target)
            cached = found if cached is None else max(cached, found or 0.0)
            one = _Pass(workload, file, target, slots, verify=verify)
            before = resource.getrusage(resource.RUSAGE_SELF)
            with meter.running():
                elapsed_s = one.run(order)
            after = resource.getrusage(resource.RUSAGE_SELF)
            user_s += after.ru_utime - before.ru_utime
            system_s += after.ru_stime - before.ru_stime
            collected.add(one, elapsed_s)
            verified += one.verified_bytes
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
    return Run(
        total=collected.requests(reads=True, writes=True),
        reads=collected.requests(reads=True, writes=False) if workload.num_reads else None,
        writes=collected.requests(reads=False, writes=True) if workload.num_writes else None,
        intervals=collected.series.intervals(collected.elapsed_s),
        elapsed_s=collected.elapsed_s,
        ramp_s=ramp_s,
        sync_s=sync_s,
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


class _Collected:
    """Results of the passes so far."""

    def __init__(self, workload: Workload) -> None:
        """Begin without any pass."""
        self._size = workload.size
        self._latencies: dict[bool, list[np.ndarray[Any, Any]]] = {True: [], False: []}
        self.series = Series(workload.interval_s, workload.size)
        self.elapsed_s = 0.0
        self.passes = 0

    def add(self, one: _Pass, elapsed_s: float) -> None:
        """Add a pass that took `elapsed_s` seconds."""
        begun_s, ended_s, is_read = one.records()
        latency_s = ended_s - begun_s
        self.series.add(self.elapsed_s + ended_s - one.started_s, latency_s, is_read)
        for direction, kept in self._latencies.items():
            kept.append(latency_s[is_read == direction])
        self.elapsed_s += elapsed_s
        self.passes += 1

    def requests(self, *, reads: bool, writes: bool) -> Requests:
        """Return the requests of the chosen directions; at least one must have been made."""
        latency_s = np.concatenate(
            [*(self._latencies[True] if reads else ()), *(self._latencies[False] if writes else ())]
        )
        return Requests(
            num_requests=latency_s.size,
            num_bytes=latency_s.size * self._size,
            elapsed_s=self.elapsed_s,
            latency=latency_of(latency_s),
        )


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
        # Three numbers for each request: its begin, its end, and 1 for a read. A slot has one
        # request at a time, so no two threads append to the same array.
        self._records = [array("d") for _ in slots]
        self.started_s = 0.0
        """Start of the pass in seconds, on the clock of `time.perf_counter`."""
        self.verified_bytes = 0

    def run(self, order: _Order, *, limit_s: float = math.inf) -> float:
        """Run requests, and return the seconds until the end of the last one.

        Args:
            order: Number of the block for each request, and whether to read it.
            limit_s: Time in seconds after which no further request is started.
        """
        for slot in range(len(self._slots)):
            self._free.put(slot)
        self.started_s = time.perf_counter()
        for block, is_read in order:
            slot = self._free.get()
            self._settle(slot)
            self._start(slot, block * self._size, is_read=is_read)
            if time.perf_counter() - self.started_s >= limit_s:
                break
        for _ in self._slots:
            self._settle(self._free.get())
        return max(record[-2] for record in self._records if record) - self.started_s

    def records(self) -> tuple[Values, Values, np.ndarray[Any, np.dtype[np.bool_]]]:
        """Return begins and ends of all requests in seconds, and whether each is a read.

        The arrays have the shape (requests,), and are in no particular order.
        """
        table = np.concatenate([np.frombuffer(record) for record in self._records]).reshape(-1, 3)
        return table[:, 0], table[:, 1], table[:, 2] > 0

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
        future.add_done_callback(partial(self._ended, slot, begun_s, is_read))

    def _ended(self, slot: int, begun_s: float, is_read: bool, _: IOFuture) -> None:
        """Record the end of a slot's request, on the thread of the transfer."""
        self._records[slot].extend((begun_s, time.perf_counter(), is_read))
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
