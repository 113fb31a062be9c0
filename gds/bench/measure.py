"""Measurement of one workload on a backend: rates, latencies, processor time, and data checks."""

from __future__ import annotations

import contextlib
import ctypes
import resource
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from gds.bench.passes import Lane, Order, Pass, StagedPass, order_of, ordinary_memory
from gds.bench.result import Requests, Run, Series, latency_of
from gds.bench.target import Target
from gds.bench.workload import Workload
from gds.contract import Backend
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
    """
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

        begin: Callable[[], Pass] = partial(Pass, workload, opened, verify=verify)
        if workload.staged:
            memory = ordinary_memory(workload, every[0])
            begin = partial(StagedPass, workload, opened, memory)

        def orders() -> list[Order]:
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


class _Collected:
    """Results of the passes so far."""

    def __init__(self, workload: Workload) -> None:
        self._size = workload.size
        self._latencies: dict[bool, list[np.ndarray[Any, Any]]] = {True: [], False: []}
        self.series = Series(workload.interval_s, workload.size)
        self._lane_rates: list[list[float]] = []
        self.elapsed_s = 0.0
        self.passes = 0

    def add(self, one: Pass, elapsed_s: float) -> None:
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
        latency_s = np.concatenate(
            [*(self._latencies[True] if reads else ()), *(self._latencies[False] if writes else ())]
        )
        return Requests(
            num_requests=latency_s.size,
            num_bytes=latency_s.size * self._size,
            elapsed_s=self.elapsed_s,
            latency=latency_of(latency_s),
        )


def _prepare_cache(workload: Workload, targets: Sequence[Target]) -> float | None:
    """Bring the page cache into the state to measure; return the share that it holds, if known."""
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


_FUNCTIONS: Final = (
    "nvmlInit_v2",
    "nvmlShutdown",
    "nvmlErrorString",
    "nvmlDeviceGetHandleByPciBusId_v2",
    "nvmlDeviceGetPcieThroughput",
)
_PERIOD_S: Final = 0.05
_TX: Final = 0  # NVML_PCIE_UTIL_TX_BYTES
_RX: Final = 1  # NVML_PCIE_UTIL_RX_BYTES
_BYTES: Final = 1000
"""Number of bytes in NVML's unit KB."""


class LinkUse(NamedTuple):
    """Mean traffic that a GPU received and sent over PCIe, in GB/s; None for a `reason`."""

    rx_gbps: float | None
    tx_gbps: float | None
    samples: int
    reason: str


class LinkMeter:
    """Samples both directions of a GPU's link in turns through NVML, on its own thread.

    The counter includes packet headers and the transfers of other programs. NVML has none of the
    copy engines alone.
    """

    def __init__(
        self, library: Any = None, device: ctypes.c_void_p | None = None, *, reason: str = ""
    ) -> None:
        """Measure a device; without a library, nothing is sampled for a `reason`."""
        self._library = library
        self._device = device
        self._sums = {_RX: 0.0, _TX: 0.0}
        self._samples = 0
        self._reason = reason

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Sample until the body ends; a sample that ends after the body does not count."""
        if self._library is None:
            yield
            return
        ended = threading.Event()
        thread = threading.Thread(target=self._sample, args=(ended,), name="gds-link", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def use(self) -> LinkUse:
        """Return the mean traffic in all contexts so far, or the reason why it is not known."""
        if not self._samples:
            short = "no pass took long enough for a sample of 20 ms in each direction"
            return LinkUse(None, None, 0, self._reason or short)
        rx, tx = (self._sums[counter] / self._samples / 1e9 for counter in (_RX, _TX))
        return LinkUse(rx, tx, self._samples, "")

    def close(self) -> None:
        """Shut NVML down. Idempotent."""
        library, self._library = self._library, None
        if library is not None:
            library.nvmlShutdown()

    def _sample(self, ended: threading.Event) -> None:
        """Take samples until `ended` is set, or until NVML reports an error."""
        while not ended.is_set():
            found: dict[int, float] = {}
            for counter in (_RX, _TX):
                value = ctypes.c_uint()
                # The call takes 20 ms, and does not hold the GIL.
                status = self._library.nvmlDeviceGetPcieThroughput(
                    self._device, ctypes.c_int(counter), ctypes.byref(value)
                )
                if status:
                    self._reason = _error_text(self._library, "nvmlDeviceGetPcieThroughput", status)
                    return
                found[counter] = value.value * _BYTES
            if ended.is_set():
                return
            for counter, rate in found.items():
                self._sums[counter] += rate
            self._samples += 1
            ended.wait(_PERIOD_S)


def link_meter(
    backend: object, load: Callable[[], Any] = lambda: ctypes.CDLL("libnvidia-ml.so.1")
) -> LinkMeter:
    """Return a meter of the link of a backend's GPU; if that cannot be read, it says why."""
    cuda = getattr(backend, "cuda", None)
    if cuda is None:
        return LinkMeter(reason="no memory of a GPU is moved")
    try:
        bus = str(cuda.pci_bus_id())
        library = load()
        for name in _FUNCTIONS:
            getattr(library, name)  # an old library may lack it
        library.nvmlErrorString.restype = ctypes.c_char_p
    except (OSError, AttributeError, RuntimeError) as error:
        return LinkMeter(reason=f"NVML cannot be used: {error}")
    status = library.nvmlInit_v2()
    if status:
        return LinkMeter(reason=_error_text(library, "nvmlInit", status))
    # By bus address, because NVML and CUDA number the devices in different orders.
    device = ctypes.c_void_p()
    status = library.nvmlDeviceGetHandleByPciBusId_v2(bus.encode(), ctypes.byref(device))
    if status:
        library.nvmlShutdown()
        call = f"nvmlDeviceGetHandleByPciBusId({bus})"
        return LinkMeter(reason=_error_text(library, call, status))
    return LinkMeter(library, device)


def _error_text(library: Any, call: str, status: int) -> str:
    words = library.nvmlErrorString(ctypes.c_int(status))
    text = words.decode(errors="replace") if isinstance(words, bytes) else str(words)
    return f"{call}: {text} ({status})"
