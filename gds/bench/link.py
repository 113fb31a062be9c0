"""Meter of a GPU's PCIe traffic during a measurement, sampled by NVML.

NVML has no counter of copy engines. It has a counter of the traffic over PCIe, to which copy
engines and the DMA of GPUDirect Storage contribute alike. This counter includes packet headers and
the transfers of other programs. If NVML cannot be read, the meter reports the reason.
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
"""Function that returns the loaded NVML library; raises `OSError` if it is missing."""

LIBRARY: Final = "libnvidia-ml.so.1"
"""File name of the NVML library."""

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


@dataclass(frozen=True, slots=True)
class LinkUse:
    """Traffic over a GPU's PCIe link, as the mean of all samples."""

    rx_gbps: float | None
    """Traffic that the GPU received, in GB/s (1e9 bytes); None if it cannot be read."""

    tx_gbps: float | None
    """Traffic that the GPU sent, in GB/s (1e9 bytes); None if it cannot be read."""

    samples: int
    """Number of samples in each direction; a sample takes 20 ms."""

    reason: str
    """Reason, for people, why the traffic cannot be read; empty if it can."""


class LinkMeter(Protocol):
    """Meter of the traffic over a link."""

    def running(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the meter takes samples."""
        ...

    def use(self) -> LinkUse:
        """Return the traffic in all contexts so far."""
        ...

    def close(self) -> None:
        """Release the library. Idempotent."""
        ...


@runtime_checkable
class HasGpu(Protocol):
    """A backend of device memory."""

    cuda: Any
    """Device of the backend, with a method `pci_bus_id`."""


class Unreadable:
    """A meter of a link whose traffic cannot be read."""

    def __init__(self, reason: str) -> None:
        """Keep the reason, for people."""
        self._reason = reason

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Return a context in which nothing is sampled."""
        yield

    def use(self) -> LinkUse:
        """Return no traffic, with the reason."""
        return LinkUse(None, None, 0, self._reason)

    def close(self) -> None:
        """Do nothing: there is no library to release."""


class NvmlMeter:
    """A meter that samples both directions in turns through NVML, on its own thread."""

    def __init__(self, library: Any, device: ctypes.c_void_p) -> None:
        """Measure a device."""
        self._library = library
        self._device = device
        self._sums = {_RX: 0.0, _TX: 0.0}
        self._samples = 0
        self._reason = ""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Sample until the body ends; a sample that ends after the body does not count."""
        ended = threading.Event()
        thread = threading.Thread(target=self._sample, args=(ended,), name="gds-link", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def use(self) -> LinkUse:
        """Return the mean traffic, or the reason why it is not known."""
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


def link_meter(backend: object, load: LoadLibrary | None = None) -> LinkMeter:
    """Return a meter of the link of a backend's GPU.

    If the traffic cannot be read, the meter reports the reason; this function does not raise.
    """
    if not isinstance(backend, HasGpu):
        return Unreadable("no memory of a GPU is moved")
    try:
        bus = str(backend.cuda.pci_bus_id())
        library = (load or partial(ctypes.CDLL, LIBRARY))()
        for name in _FUNCTIONS:
            getattr(library, name)  # an old library may lack it
        library.nvmlErrorString.restype = ctypes.c_char_p
    except (OSError, AttributeError, RuntimeError) as error:
        return Unreadable(f"NVML cannot be used: {error}")
    status = library.nvmlInit_v2()
    if status:
        return Unreadable(_error_text(library, "nvmlInit", status))
    # By bus address, because NVML and CUDA number the devices in different orders.
    device = ctypes.c_void_p()
    status = library.nvmlDeviceGetHandleByPciBusId_v2(bus.encode(), ctypes.byref(device))
    if status:
        library.nvmlShutdown()
        return Unreadable(_error_text(library, f"nvmlDeviceGetHandleByPciBusId({bus})", status))
    return NvmlMeter(library, device)


def _error_text(library: Any, call: str, status: int) -> str:
    """Return the error of a call of NVML as text."""
    words = library.nvmlErrorString(ctypes.c_int(status))
    text = words.decode(errors="replace") if isinstance(words, bytes) else str(words)
    return f"{call}: {text} ({status})"
