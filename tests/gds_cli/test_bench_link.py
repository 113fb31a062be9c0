"""What `gds bench` reads of a GPU's link: with a library that answers what a test tells it to."""

from __future__ import annotations

import ctypes
import io
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rich.console import Console

import gds.bench.measure
import gds.bench.passes
import gds.buffers.cuda
from gds.bench.measure import link_meter
from gds.bench.run import Plan
from gds.bench.run import run as run_plan
from gds.bench.screen import show
from gds.bench.workload import Workload
from gds.kvikio import KvikioBackend, Used
from tests.fake_gpu.machine import FakeGpu, installed
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
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    monkeypatch.setattr(gds.bench.measure, "_PERIOD_S", 0.0)
    return FakeNvml()


def no_library():
    raise OSError("libnvidia-ml.so.1: cannot open shared object file")


def report_of(drive, machine, monkeypatch, load, path="compat"):
    """Measure memory; returns the figures of the run, and what is shown to people."""
    monkeypatch.setattr(gds.bench.measure, "link_meter", lambda b: link_meter(b, load))
    workload = Workload(path=path, size=1 << 16, file_bytes=1 << 20)
    plan = Plan(places=[str(drive)], workloads=[workload], allow_small=True)
    report = run_plan(plan, system=machine)
    show(report, console := Console(file=io.StringIO(), width=200))
    (found,) = report.to_json()["results"][0]["runs"]
    return found, console.file.getvalue()


def test_a_report_shows_what_crossed_or_why_it_does_not_know(
    drive, machine, gpu, nvml, monkeypatch
):
    found, shown = report_of(drive, machine, monkeypatch, no_library)
    assert (found["pcie_rx_gbps"], found["pcie_tx_gbps"], found["pcie_samples"]) == (None, None, 0)
    reason = "PCIe traffic could not be read: NVML cannot be used: libnvidia-ml.so.1: cannot open"
    assert reason in shown
    found, shown = report_of(drive, machine, monkeypatch, lambda: nvml, path="direct")
    assert "PCIe" not in shown
    assert found["pcie_reason"] == "no memory of a GPU is moved"
    assert nvml.bus == b""
    real = gds.bench.passes.Pass.run

    def run(self, order, **limits):
        elapsed_s = real(self, order, **limits)
        assert nvml.fails or nvml.sampled.wait(60)  # so that there is a sample, however fast it is
        return elapsed_s

    monkeypatch.setattr(gds.bench.passes.Pass, "run", run)
    others = threading.enumerate()
    found, shown = report_of(drive, machine, monkeypatch, lambda: nvml)
    assert (found["pcie_rx_gbps"], found["pcie_tx_gbps"]) == (3.0, 0.5), "in both directions"
    assert found["pcie_samples"] >= 1
    assert found["pcie_reason"] == ""
    assert "PCIe rx" in shown
    assert "could not be read" not in shown
    assert nvml.bus == b"0000:40:00.0", "of the GPU that is used"
    assert not since(others, "gds-link")
    for fails, reason in {
        "init": "nvmlInit: Not Supported (3)",
        "handle": "nvmlDeviceGetHandleByPciBusId(0000:40:00.0): Not Supported (3)",
    }.items():
        nvml.fails = {fails: 3}
        found, shown = report_of(drive, machine, monkeypatch, lambda: nvml)
        assert (found["pcie_samples"], found["pcie_reason"]) == (0, reason)
    assert nvml.open == 0


@pytest.mark.gpu
def test_the_drivers_library_answers():
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
    assert found.rx_gbps >= 0
    assert found.tx_gbps >= 0
