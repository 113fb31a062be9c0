"""What `gds bench` reads of a GPU's link: with a library that answers what a test tells it to."""

from __future__ import annotations

import ctypes
import io
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import gds.bench.measure
import gds.bench.passes
import gds.buffers.cuda
from gds import PosixBackend
from gds.backends.kvikio_file import Used
from gds.bench import link
from gds.bench.link import LinkUse, link_meter
from gds.bench.run import Plan
from gds.bench.run import run as run_plan
from gds.bench.screen import show
from gds.bench.workload import Workload
from gds.kvikio import KvikioBackend
from tests.fake_gpu.machine import FakeGpu, installed
from tests.gds_cli.machines import Machine
from tests.threads import since

HANDLE = 0x7F00_1234_5678
RX_KB, TX_KB = 3_000_000, 500_000
TX, RX = 0, 1


class Function:
    """A function of a library, as ctypes has it: with attributes."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self.restype: Any = ctypes.c_int

    def __call__(self, *arguments: Any) -> Any:
        result = self._call(*arguments)
        # What ctypes makes of a pointer whose type nobody has told it.
        return result if isinstance(result, int) or self.restype is ctypes.c_char_p else 12345


class FakeNvml:
    """``libnvidia-ml.so.1``; functions fail with the statuses in `fails`."""

    def __init__(self) -> None:
        self.fails: dict[str, int] = {}
        self.open = 0
        self.bus = b""
        self.sampled = threading.Event()
        self.nvmlInit_v2 = Function(self._init)
        self.nvmlShutdown = Function(self._shutdown)
        self.nvmlErrorString = Function(lambda status: {3: b"Not Supported"}[status.value])
        self.nvmlDeviceGetHandleByPciBusId_v2 = Function(self._handle)
        self.nvmlDeviceGetPcieThroughput = Function(self._throughput)
        self.count = 0

    def _init(self) -> int:
        self.open += not self.fails.get("init", 0)
        return self.fails.get("init", 0)

    def _shutdown(self) -> int:
        self.open -= 1
        return 0

    def _handle(self, bus: bytes, handle: Any) -> int:
        self.bus = bus
        handle._obj.value = HANDLE
        return self.fails.get("handle", 0)

    def _throughput(self, device: ctypes.c_void_p, counter: ctypes.c_int, value: Any) -> int:
        assert self.open == 1
        assert device.value == HANDLE
        value._obj.value = {TX: TX_KB, RX: RX_KB}[counter.value]
        self.count += 1
        if self.count > 2:  # a whole sample has been taken in
            self.sampled.set()
        return self.fails.get("throughput", 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    used = Used("bounce", "no nvidia-fs")
    monkeypatch.setattr("gds.backends.kvikio._examined", lambda _: {"read": used, "write": used})
    with installed(monkeypatch) as fake:
        fake.compat_is_measured = True
        yield fake


@pytest.fixture
def backend(gpu: FakeGpu) -> Iterator[KvikioBackend]:
    made = KvikioBackend()
    yield made
    made.close()


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    monkeypatch.setattr(link, "_PERIOD_S", 0.0)
    return FakeNvml()


def test_both_directions_of_the_gpu_that_is_used_are_sampled(backend, nvml) -> None:
    others = threading.enumerate()
    meter = link_meter(backend, lambda: nvml)
    assert nvml.bus == b"0000:40:00.0"
    with meter.running():
        assert nvml.sampled.wait(60)
    found = meter.use()
    assert (found.rx_gbps, found.tx_gbps, found.reason) == (3.0, 0.5, "")
    assert found.samples >= 1
    meter.close()
    meter.close()
    assert nvml.open == 0
    assert not since(others, "gds-link")


def test_a_sample_that_outlasts_the_transfers_does_not_count(
    backend, nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter = link_meter(backend, lambda: nvml)
    ended = threading.Event()
    real = nvml._throughput

    def slow(*arguments: Any) -> int:
        nvml.sampled.set()
        assert ended.wait(60)
        return real(*arguments)

    class Joined(threading.Thread):
        def join(self, timeout: float | None = None) -> None:
            ended.set()  # the block has ended, and waits for the call that is under way
            super().join(timeout)

    nvml.nvmlDeviceGetPcieThroughput = Function(slow)
    monkeypatch.setattr(link.threading, "Thread", Joined)
    with meter.running():
        assert nvml.sampled.wait(60)
    monkeypatch.undo()
    assert ended.is_set()
    found = meter.use()
    assert found == LinkUse(
        None, None, 0, "no pass took long enough for a sample of 20 ms in each direction"
    )
    meter.close()


@pytest.mark.parametrize(
    ("fails", "reason"),
    [
        ("init", "nvmlInit: Not Supported (3)"),
        ("handle", "nvmlDeviceGetHandleByPciBusId(0000:40:00.0): Not Supported (3)"),
        ("throughput", "nvmlDeviceGetPcieThroughput: Not Supported (3)"),
    ],
)
def test_what_nvml_refuses_is_the_reason(backend, nvml, fails, reason) -> None:
    nvml.fails[fails] = 3
    meter = link_meter(backend, lambda: nvml)
    with meter.running():
        while fails == "throughput" and not nvml.count:
            time.sleep(0.001)
    assert meter.use() == LinkUse(None, None, 0, reason)
    meter.close()
    assert nvml.open == 0


def no_library() -> Any:
    raise OSError("libnvidia-ml.so.1: cannot open shared object file")


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (no_library, "NVML cannot be used: libnvidia-ml.so.1: cannot open"),
        (lambda: object(), "NVML cannot be used: 'object' object has no attribute 'nvmlInit_v2'"),
    ],
    ids=["missing", "old"],
)
def test_a_library_that_cannot_be_used_is_the_reason(backend, load, reason) -> None:
    meter = link_meter(backend, load)
    with meter.running():
        pass
    assert meter.use().reason.startswith(reason)
    meter.close()


def test_memory_of_the_host_has_no_such_link(nvml) -> None:
    backend = PosixBackend()
    meter = link_meter(backend, lambda: nvml)
    assert meter.use() == LinkUse(None, None, 0, "no memory of a GPU is moved")
    assert nvml.bus == b""
    backend.close()


def report_of(drive: Path, machine: Machine, monkeypatch, load: Any) -> tuple[Any, str]:
    """Measure device memory; returns the report, and what it shows to people."""
    monkeypatch.setattr(gds.bench.measure, "link_meter", lambda b: link_meter(b, load))
    workload = Workload(path="compat", size=1 << 16, file_bytes=1 << 20)
    plan = Plan(place=str(drive), workloads=[workload], allow_small=True)
    report = run_plan(plan, system=machine)
    console = Console(file=io.StringIO(), width=200)
    show(report, console)
    return report, console.file.getvalue()


def test_a_report_shows_what_crossed(drive, machine, gpu, nvml, monkeypatch) -> None:
    real = gds.bench.passes.Pass.run

    def run(self: Any, order: Any, **limits: float) -> float:
        elapsed_s = real(self, order, **limits)
        assert nvml.sampled.wait(60)  # so that there is a sample, however fast the drive is
        return elapsed_s

    monkeypatch.setattr(gds.bench.passes.Pass, "run", run)
    report, shown = report_of(drive, machine, monkeypatch, lambda: nvml)
    (run_,) = report.to_json()["results"][0]["runs"]
    assert (run_["pcie_rx_gbps"], run_["pcie_tx_gbps"]) == (3.0, 0.5)
    assert run_["pcie_samples"] >= 1
    assert run_["pcie_reason"] == ""
    assert "PCIe rx" in shown
    assert " 3.000 " in shown
    assert "NVML has no counters of the copy engines" in shown
    assert "could not be read" not in shown
    assert nvml.open == 0


def test_a_report_says_why_it_does_not_know(drive, machine, gpu, monkeypatch) -> None:
    report, shown = report_of(drive, machine, monkeypatch, no_library)
    (run_,) = report.to_json()["results"][0]["runs"]
    assert (run_["pcie_rx_gbps"], run_["pcie_tx_gbps"], run_["pcie_samples"]) == (None, None, 0)
    assert (
        "PCIe traffic could not be read: NVML cannot be used: libnvidia-ml.so.1: cannot open"
        in shown
    )


def test_a_report_of_host_memory_has_no_such_columns(drive, machine) -> None:
    workload = Workload(path="direct", size=1 << 16, file_bytes=1 << 20)
    report = run_plan(
        Plan(place=str(drive), workloads=[workload], allow_small=True), system=machine
    )
    console = Console(file=io.StringIO(), width=200)
    show(report, console)
    assert "PCIe" not in console.file.getvalue()
    assert report.points[0].runs[0].pcie_reason == "no memory of a GPU is moved"


@pytest.mark.gpu
def test_the_drivers_library_answers() -> None:
    pytest.importorskip("cupy")
    if reason := gds.buffers.cuda.no_driver():
        pytest.skip(reason)
    backend = KvikioBackend(path="bounce")
    meter = link_meter(backend)
    with meter.running():
        threading.Event().wait(0.3)
    found = meter.use()
    meter.close()
    backend.close()
    if found.reason:
        pytest.skip(found.reason)  # virtual GPUs and sandboxes do not say
    assert found.samples >= 1
    assert found.rx_gbps is not None
    assert found.tx_gbps is not None
    assert found.rx_gbps >= 0
    assert found.tx_gbps >= 0
