"""What a GPU's link carries while it is measured, as NVML samples it; and why not, where it cannot.

NVML has no counter of copy engines. What it has is the traffic over PCIe, which is what they and
the DMA of GPUDirect Storage cause, both alike. It counts everything that crosses: what other
programs move as well, and the packets' headers.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, TypeAlias, runtime_checkable

LoadLibrary: TypeAlias = Callable[[], Any]
"""Returns the loaded library; raises `OSError` where there is none."""

LIBRARY: Final = "libnvidia-ml.so.1"
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
"""In what NVML calls KB."""


@dataclass(frozen=True, slots=True)
class LinkUse:
    """What crossed a GPU's PCIe link, in the mean of all samples."""

    rx_gbps: float | None
    """GB/s (1e9 bytes) that the GPU received; None where that is not readable."""

    tx_gbps: float | None
    """GB/s that it sent."""

    samples: int
    """Of 20 ms each, in each direction."""

    reason: str
    """Why it is not readable, for people; empty where it is."""


class LinkMeter(Protocol):
    """Notes what crosses a link."""

    def running(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which samples are taken."""
        ...

    def use(self) -> LinkUse:
        """Return what was noted in all of them."""
        ...

    def close(self) -> None:
        """Let go of the library. Idempotent."""
        ...


@runtime_checkable
class HasGpu(Protocol):
    """A backend of device memory."""

    cuda: Any
    """With a `pci_bus_id`."""


class Unreadable:
    """Stands where nothing can be read."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Do nothing."""
        yield

    def use(self) -> LinkUse:
        """Say why there is nothing."""
        return LinkUse(None, None, 0, self._reason)

    def close(self) -> None:
        """Do nothing."""


class NvmlMeter:
    """Samples both directions in turns, on a thread of its own, while transfers run."""

    def __init__(self, library: Any, device: ctypes.c_void_p) -> None:
        self._library = library
        self._device = device
        self._sums = {_RX: 0.0, _TX: 0.0}
        self._samples = 0
        self._reason = ""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Sample until the block ends; a sample that outlasts it does not count."""
        ended = threading.Event()
        thread = threading.Thread(target=self._sample, args=(ended,), name="gds-link", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def use(self) -> LinkUse:
        """Return the means, or why there are none."""
        if not self._samples:
            short = "no pass took long enough for a sample of 20 ms in each direction"
            return LinkUse(None, None, 0, self._reason or short)
        rx, tx = (self._sums[counter] / self._samples / 1e9 for counter in (_RX, _TX))
        return LinkUse(rx, tx, self._samples, "")

    def close(self) -> None:
        """Let NVML go."""
        library, self._library = self._library, None
        if library is not None:
            library.nvmlShutdown()

    def _sample(self, ended: threading.Event) -> None:
        while not ended.is_set():
            found: dict[int, float] = {}
            for counter in (_RX, _TX):
                value = ctypes.c_uint()
                # Which takes 20 ms, and does not hold the interpreter's lock.
                status = self._library.nvmlDeviceGetPcieThroughput(
                    self._device, ctypes.c_int(counter), ctypes.byref(value)
                )
                if status:
                    self._reason = _said(self._library, "nvmlDeviceGetPcieThroughput", status)
                    return
                found[counter] = value.value * _BYTES
            if ended.is_set():
                return
            for counter, rate in found.items():
                self._sums[counter] += rate
            self._samples += 1
            ended.wait(_PERIOD_S)


def link_meter(backend: object, load: LoadLibrary | None = None) -> LinkMeter:
    """Return what reads the link of a backend's GPU; never raises.

    Args:
        backend: Any; one of host memory has no such link.
        load: Loads NVML; None takes the driver's.
    """
    if not isinstance(backend, HasGpu):
        return Unreadable("no memory of a GPU is moved")
    try:
        bus = str(backend.cuda.pci_bus_id())
        library = (load or partial(ctypes.CDLL, LIBRARY))()
        for name in _FUNCTIONS:
            getattr(library, name)  # an old one may lack it
        library.nvmlErrorString.restype = ctypes.c_char_p
    except (OSError, AttributeError, RuntimeError) as error:
        return Unreadable(f"NVML cannot be used: {error}")
    status = library.nvmlInit_v2()
    if status:
        return Unreadable(_said(library, "nvmlInit", status))
    # By its place on the bus: NVML numbers devices in another order than CUDA does.
    device = ctypes.c_void_p()
    status = library.nvmlDeviceGetHandleByPciBusId_v2(bus.encode(), ctypes.byref(device))
    if status:
        library.nvmlShutdown()
        return Unreadable(_said(library, f"nvmlDeviceGetHandleByPciBusId({bus})", status))
    return NvmlMeter(library, device)


def _said(library: Any, call: str, status: int) -> str:
    words = library.nvmlErrorString(ctypes.c_int(status))
    text = words.decode(errors="replace") if isinstance(words, bytes) else str(words)
    return f"{call}: {text} ({status})"
