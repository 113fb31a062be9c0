"""CUDA calls of the transfers, made through CuPy: memory, copies, page-locking and events.

CuPy is imported when a `Cuda` is made, and nowhere else, so that transfers of host memory work
without CuPy. The calls block; CuPy releases the GIL while they wait.
"""

from __future__ import annotations

import ctypes
import importlib
import threading
from typing import Any, Final, Literal, Protocol

from gds.errors import RefusedError

REMEDY: Final = (
    "run pip install --constraint constraints-gpu.txt '.[gpu]' in a checkout of ssd-offload, "
    "which is not on a package index"
)
"""Command that installs the packages that move GPU memory."""

_REGISTER_PORTABLE: Final = 1
"""Flag that page-locks memory for every CUDA context, because several libraries transfer it."""


class Event(Protocol):
    """A point in the work that was queued on a stream."""

    def synchronize(self) -> None:
        """Wait until the work queued before the event has been done."""
        ...


class DeviceMemory(Protocol):
    """An allocation on a device, released when the object is collected."""

    ptr: int
    """Device address of the first byte."""


def no_driver() -> str:
    """Return the reason why the CUDA driver cannot be loaded; empty if it can.

    KvikIO and CuPy can be imported without a driver, and fail in their first transfer.
    """
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return str(error)
    return ""


def require(module: str) -> Any:
    """Import and return a library of the extra ``gpu``.

    Raises:
        RefusedError: The library or the CUDA driver is missing; the message names the remedy.
    """
    if refusal := no_driver():
        raise RefusedError(
            f"GPU memory cannot be used, because no CUDA driver is usable ({refusal}): install "
            "the driver, or start the container with --gpus all. For host memory alone, use "
            "PosixBackend"
        )
    try:
        return importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        # OSError, RuntimeError: the module loads a CUDA library, such as cuFile, that is missing.
        raise RefusedError(
            f"GPU memory is transferred with {module}, which cannot be imported "
            f"({' '.join(str(error).split())}): {REMEDY}"
        ) from error


class _Handle:
    """A stream given by its raw handle, with the one attribute that CuPy reads."""

    def __init__(self, ptr: int) -> None:
        """Keep the handle."""
        self.ptr = ptr


class Cuda:
    """One device, with a private stream for copies, which never waits for the default stream.

    All methods may be called from several threads at once.
    """

    def __init__(self, device: int | None = None) -> None:
        """Use a device.

        Args:
            device: Number of the device; None is the current device of this thread.

        Raises:
            RefusedError: CuPy or the driver is missing, or the device does not exist.
        """
        cupy = require("cupy")
        self._cuda = cupy.cuda
        self._runtime = cupy.cuda.runtime
        try:
            self.device = int(self._runtime.getDevice() if device is None else device)
            with self._current():
                # Non-blocking: copies do not wait for the legacy default stream, torch's default.
                self._stream = self._cuda.Stream(non_blocking=True)
        except RuntimeError as error:
            which = "no GPU can be used" if device is None else f"GPU {device} cannot be used"
            raise RefusedError(
                f"{which}: {error}; nvidia-smi lists the GPUs of this machine, and "
                "CUDA_VISIBLE_DEVICES may hide some of them. For host memory alone, use "
                "PosixBackend"
            ) from error
        self._lock = threading.Lock()

    def pci_bus_id(self) -> str:
        """Return the device's address on the PCI bus, such as ``0000:41:00.0``."""
        return str(self._runtime.deviceGetPCIBusId(self.device))

    def allocate(self, nbytes: int) -> DeviceMemory:
        """Return `nbytes` bytes of uninitialised memory, as a separate allocation outside any pool.

        cuFile registers whole allocations. An allocation of a pool would also hold the memory of
        other users.

        Raises:
            MemoryError: The device has no free range of that length.
        """
        with self._current():
            try:
                memory: DeviceMemory = self._cuda.Memory(nbytes)
            except RuntimeError as error:
                raise MemoryError(
                    f"cannot allocate {nbytes} bytes on GPU {self.device}: {error}"
                ) from error
        return memory

    def zero(self, address: int, nbytes: int) -> None:
        """Set a range of device memory to zeros; it is done on return."""
        with self._lock, self._current():
            self._runtime.memsetAsync(address, 0, nbytes, self._stream.ptr)
            self._stream.synchronize()

    def copy(
        self, target: int, source: int, nbytes: int, direction: Literal["to device", "to host"]
    ) -> None:
        """Copy between host and device; the bytes have arrived on return.

        Args:
            target: Address of the first byte to write.
            source: Address of the first byte to read.
            nbytes: Length in bytes.
            direction: Direction of the copy. The device address is `target` for ``"to device"``,
                and `source` for ``"to host"``.
        """
        kind = (
            self._runtime.memcpyHostToDevice
            if direction == "to device"
            else self._runtime.memcpyDeviceToHost
        )
        with self._current():
            # The wait is outside the lock, so that copies of several threads overlap.
            with self._lock:
                self._runtime.memcpyAsync(target, source, nbytes, kind, self._stream.ptr)
                event = self._event()
                event.record(self._stream)
            event.synchronize()

    def pin(self, address: int, nbytes: int) -> None:
        """Page-lock a range of host memory, so that the device copies it at full speed.

        Raises:
            RuntimeError: CUDA refuses to lock the range.
        """
        with self._current():
            self._runtime.hostRegister(address, nbytes, _REGISTER_PORTABLE)

    def unpin(self, address: int) -> None:
        """Undo `pin` of the range that starts at `address`."""
        with self._current():
            self._runtime.hostUnregister(address)

    def record(self, stream: int) -> Event:
        """Return an event that follows all work queued on a stream by now.

        Args:
            stream: Raw handle: ``torch.cuda.Stream.cuda_stream`` or ``cupy.cuda.Stream.ptr``; 0
                is the legacy default stream.
        """
        with self._current():
            event = self._event()
            event.record(_Handle(stream))
        recorded: Event = event
        return recorded

    def _event(self) -> Any:
        """Return a new event."""
        # Blocking: a waiting thread sleeps. Spinning would take a core from the training.
        return self._cuda.Event(block=True, disable_timing=True)

    def use(self) -> None:
        """Make the device current in the calling thread, permanently.

        Call it only from threads of this package. Switching back, as `_current` does, would create
        a context on device 0, which these threads do not use.
        """
        if int(self._runtime.getDevice()) != self.device:
            self._runtime.setDevice(self.device)

    def _current(self) -> Any:
        """Return a context in which the device is current in the calling thread."""
        return self._cuda.Device(self.device)
