"""Measurement of one workload on a backend: rates, latencies, processor time, and data checks."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from typing import Any, TypeAlias

import numpy as np

from gds.bench.latency import latency_of
from gds.bench.link import link_meter
from gds.bench.passes import Lane, Order, Pass, order_of
from gds.bench.result import Requests, Run
from gds.bench.series import Series
from gds.bench.staged import StagedPass, ordinary_memory
from gds.bench.target import Target
from gds.bench.workload import Workload
from gds.contract import Backend
from gds.errors import RefusedError
from gds.paths import PathName

OpenBackend: TypeAlias = Callable[[PathName, int], Backend]
"""Function that makes a backend for a path, with a number of threads in each direction."""


def measure(
    workload: Workload,
    lanes: Sequence[Sequence[Target]],
    open_backend: OpenBackend,
    *,
    verify: bool = False,
    seed: int = 0,
) -> Run:
    """Run a workload once.

    Args:
        workload: Requests to run.
        lanes: Files to transfer to and from, by directory. Each directory has a backend of its own,
            with the threads and the depth of the workload, and makes all of its requests.
        open_backend: Function that makes a backend, which is closed afterwards.
        verify: Compare the data of all reads with the expected data, and read back all data after
            writes. The comparison takes processor time, so rates are lower than without it.
        seed: Seed of the random order of requests.

    Raises:
        RefusedError: The workload would write to, or verify, an existing file of the user, or
            several directories are to be measured through ordinary memory.
        WrongDataError: A read returned other data than was written.
        StorageError: A transfer failed.
    """
    for targets in lanes:
        check_allowed(workload, targets[0], verify=verify)
    check_staged(workload, len(lanes), verify=verify)
    generator = np.random.default_rng(seed)
    collected = _Collected(workload)
    ramp_s = sync_s = user_s = system_s = 0.0
    cached: float | None = None
    verified = 0
    with ExitStack() as stack:
        opened: list[Lane] = []
        for targets in lanes:
            backend = stack.enter_context(closing(open_backend(workload.path, workload.threads)))
            if not opened:
                meter = stack.enter_context(closing(link_meter(backend)))
            opened.append(stack.enter_context(closing(Lane(backend, workload, targets))))
        every = [target for targets in lanes for target in targets]

        begin = _passes(workload, opened, verify=verify)

        def orders() -> list[Order]:
            """Return the requests of a pass for each lane."""
            return [order_of(workload, generator) for _ in opened]

        while ramp_s < (0.0 if workload.cache == "as-is" else workload.ramp_s):
            _prepare_cache(workload, every)
            one = begin()
            ramp_s += one.run(orders(), limit_s=workload.ramp_s - ramp_s)
            if workload.writes:
                _sync(opened)
        while collected.passes < workload.passes or collected.elapsed_s < workload.seconds:
            planned = orders()
            found = _prepare_cache(workload, every)
            cached = found if cached is None else max(cached, found or 0.0)
            one = begin()
            before = resource.getrusage(resource.RUSAGE_SELF)
            with meter.running():
                elapsed_s = one.run(planned)
            after = resource.getrusage(resource.RUSAGE_SELF)
            user_s += after.ru_utime - before.ru_utime
            system_s += after.ru_stime - before.ru_stime
            collected.add(one, elapsed_s)
            verified += one.verified_bytes
            if workload.writes:
                sync_s += _sync(opened)
        direct = all(lane.direct for lane in opened)
        if verify and workload.writes:
            for target in every:
                target.drop_cache()
            again = Pass(workload, opened, verify=True)
            again.run([[(block, True) for block in range(workload.num_requests)] for _ in opened])
            verified += again.verified_bytes
    link = meter.use()
    return Run(
        total=collected.requests(reads=True, writes=True),
        reads=collected.requests(reads=True, writes=False) if workload.num_reads else None,
        writes=collected.requests(reads=False, writes=True) if workload.num_writes else None,
        lane_bytes_per_s=tuple(collected.lane_rates()),
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


def _passes(workload: Workload, lanes: Sequence[Lane], *, verify: bool) -> Callable[[], Pass]:
    """Return a function that prepares a pass of the workload."""
    if workload.staged:
        memory = ordinary_memory(workload, lanes[0].targets[0])
        return lambda: StagedPass(workload, lanes, memory)
    return lambda: Pass(workload, lanes, verify=verify)


class _Collected:
    """Results of the passes so far."""

    def __init__(self, workload: Workload) -> None:
        """Begin without any pass."""
        self._size = workload.size
        self._latencies: dict[bool, list[np.ndarray[Any, Any]]] = {True: [], False: []}
        self.series = Series(workload.interval_s, workload.size)
        self._lane_rates: list[list[float]] = []
        self.elapsed_s = 0.0
        self.passes = 0

    def add(self, one: Pass, elapsed_s: float) -> None:
        """Add a pass that took `elapsed_s` seconds."""
        begun_s, ended_s, is_read = one.records()
        latency_s = ended_s - begun_s
        self.series.add(self.elapsed_s + ended_s - one.started_s, latency_s, is_read)
        for direction, kept in self._latencies.items():
            kept.append(latency_s[is_read == direction])
        self._lane_rates.append(one.rates_of_lanes())
        self.elapsed_s += elapsed_s
        self.passes += 1

    def lane_rates(self) -> list[float]:
        """Return the rate of each lane in bytes per second, the mean over all passes."""
        passes = np.asarray(self._lane_rates)
        return [float(rate) for rate in 1 / np.mean(1 / passes, axis=0)]

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


def check_staged(workload: Workload, num_lanes: int, *, verify: bool) -> None:
    """Raise `RefusedError` if blocks cannot be moved through ordinary memory."""
    if not workload.staged:
        return
    if num_lanes > 1:
        raise RefusedError("--staged measures a single directory: name one of them")
    if verify:
        raise RefusedError("--staged measures speed, and --verify takes time: pass one of the two")


def _prepare_cache(workload: Workload, targets: Sequence[Target]) -> float | None:
    """Bring the page cache into the state to measure; returns the share of the files that it holds.

    The result is None if the share is not known.
    """
    for target in targets:
        if workload.cache == "cold":
            target.sync()
            target.drop_cache()
        elif workload.cache == "warm":
            target.warm_cache()
    shares = [target.cached() for target in targets]  # all files have the same size
    known = [share for share in shares if share is not None]
    return sum(known) / len(known) if known else None


def _sync(lanes: Sequence[Lane]) -> float:
    """Make all that was written durable, and return the seconds that this took."""
    started_s = time.perf_counter()
    for lane in lanes:
        lane.sync()
    return time.perf_counter() - started_s
