"""What transfers need of CUDA, through CuPy: memory, copies, page-locking and events. Blocking.

CuPy is imported when a `Cuda` is made, and nowhere else, so that everything that moves host memory
only works without it. Its calls release the GIL where they wait.
"""

from __future__ import annotations

import ctypes
import importlib
import threading
from typing import Any, Final, Literal, Protocol

from gds.errors import RefusedError

REMEDY: Final = (
    "in a checkout of ssd-offload, which is on no package index, run "
    "pip install --constraint constraints-gpu.txt '.[gpu]'"
)
"""What installs the packages that move memory of a GPU."""

_REGISTER_PORTABLE: Final = 1
"""Page-locked for every context: transfers run on threads of several libraries."""


class Event(Protocol):
    """A point in the work that was queued on a stream."""

    def synchronize(self) -> None:
        """Wait until the work before it has been done."""
        ...


class DeviceMemory(Protocol):
    """An allocation on a device; released when it is collected."""

    ptr: int


def no_driver() -> str:
    """Say why the CUDA driver cannot be loaded; empty where it can.

    KvikIO and CuPy import without one, and fail in their first transfer.
    """
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return str(error)
    return ""


def require(module: str) -> Any:
    """Import a library of the extra ``gpu``.

    Raises:
        RefusedError: It is not installed, or there is no CUDA driver; names the remedy.
    """
    if refusal := no_driver():
        raise RefusedError(
            f"memory of a GPU cannot be used: there is no CUDA driver ({refusal}); install it, or "
            "in a container run with --gpus all. Host memory needs none: use PosixBackend"
        )
    try:
        return importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        # The latter two where a library of CUDA that it loads, such as cuFile, is not there.
        raise RefusedError(
            f"memory of a GPU is moved with {module}, which cannot be imported "
            f"({' '.join(str(error).split())}): {REMEDY}"
        ) from error


class _Handle:
    """A stream by its raw handle: all that CuPy reads of one."""

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


class Cuda:
    """One device. Copies run on a stream of its own, which never waits for the default stream."""

    def __init__(self, device: int | None = None) -> None:
        """Use a device.

        Args:
            device: Its number; None is the one that is current in this thread.

        Raises:
            RefusedError: CuPy or the driver is missing, or it has no such device.
        """
        cupy = require("cupy")
        self._cuda = cupy.cuda
        self._runtime = cupy.cuda.runtime
        try:
            self.device = int(self._runtime.getDevice() if device is None else device)
            with self._current():
                # Work on the legacy default stream, which is torch's default, is not waited for.
                self._stream = self._cuda.Stream(non_blocking=True)
        except RuntimeError as error:
            which = "no GPU can be used" if device is None else f"GPU {device} cannot be used"
            raise RefusedError(
                f"{which}: {error}; nvidia-smi says which there are, and CUDA_VISIBLE_DEVICES "
                "hides some. Host memory needs none: use PosixBackend"
            ) from error
        self._lock = threading.Lock()

    def pci_bus_id(self) -> str:
        """Return the device's place on the bus, such as ``0000:41:00.0``."""
        return str(self._runtime.deviceGetPCIBusId(self.device))

    def allocate(self, nbytes: int) -> DeviceMemory:
        """Return uninitialised memory, an allocation of its own and no part of a pool.

        cuFile registers whole allocations: in a pool that would be the memory of others, too.

        Raises:
            MemoryError: The device has no such range to give.
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
        """Set memory of the device to zeros."""
        with self._lock, self._current():
            self._runtime.memsetAsync(address, 0, nbytes, self._stream.ptr)
            self._stream.synchronize()

    def copy(
        self, target: int, source: int, nbytes: int, direction: Literal["to device", "to host"]
    ) -> None:
        """Copy between host and device; the bytes have arrived on return."""
        kind = (
            self._runtime.memcpyHostToDevice
            if direction == "to device"
            else self._runtime.memcpyDeviceToHost
        )
        with self._current():
            # Recorded under the lock, waited for without: copies of several threads overlap.
            with self._lock:
                self._runtime.memcpyAsync(target, source, nbytes, kind, self._stream.ptr)
                event = self._event()
                event.record(self._stream)
            event.synchronize()

    def pin(self, address: int, nbytes: int) -> None:
        """Lock pages of host memory, so that the device copies to and from them at full speed."""
        with self._current():
            self._runtime.hostRegister(address, nbytes, _REGISTER_PORTABLE)

    def unpin(self, address: int) -> None:
        """Undo `pin`."""
        with self._current():
            self._runtime.hostUnregister(address)

    def record(self, stream: int) -> Event:
        """Return an event that follows what is queued now on a stream, given as its raw handle.

        That is ``torch.cuda.Stream.cuda_stream`` or ``cupy.cuda.Stream.ptr``; 0 is the legacy
        default stream.
        """
        with self._current():
            event = self._event()
            event.record(_Handle(stream))
        recorded: Event = event
        return recorded

    def _event(self) -> Any:
        # Blocking: whoever waits sleeps, where spinning would take a core from the training.
        return self._cuda.Event(block=True, disable_timing=True)

    def use(self) -> None:
        """Make the device the current one of the calling thread, for good: one of our own.

        Going back, as `_current` does, would make a context on device 0, where no thread of ours
        has any business.
        """
        if int(self._runtime.getDevice()) != self.device:
            self._runtime.setDevice(self.device)

    def _current(self) -> Any:
        return self._cuda.Device(self.device)
