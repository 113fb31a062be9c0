"""CUDA calls of the transfers, made through CuPy: memory, copies, page-locking and events.

CuPy is imported when a `Cuda` is made, and nowhere else, so that transfers of host memory work
without CuPy. The calls block; CuPy releases the GIL while they wait.

No call changes the current device of a caller's thread, not even for a moment: to change it back
would make a context, with hundreds of megabytes of memory, on a device that nobody uses.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final, Literal, Protocol, TypeVar

from gds.errors import DeviceLostError, DeviceMemoryError, RefusedError

REMEDY: Final = (
    "run pip install --constraint constraints-gpu.txt '.[gpu]' in a checkout of ssd-offload, "
    "which is not on a package index"
)
_REGISTER_PORTABLE: Final = 1
"""Flag that page-locks memory for every CUDA context, because several libraries transfer it."""


_LASTING: Final = (
    "illegal memory access",
    "unspecified launch failure",
    "ECC error",
    "NVLink error",
    "over nvlink or a hardware error",
    "device-side assert",
    "illegal instruction",
    "misaligned address",
    "global/shared address space",
    "invalid program counter",
    "hardware stack error",
    "launch timed out",
    "busy or unavailable",
    "no CUDA-capable device",
    "context is destroyed",
    "unknown error",
)
"""Words of CUDA's messages for errors after which every further call of the process fails."""

CopyDirection = Literal["to device", "to host"]
Result = TypeVar("Result")


class Event(Protocol):
    """A point in the work that was queued on a stream."""

    def synchronize(self) -> None:
        """Wait until the work queued before the event has been done."""
        ...


def is_lost(error: BaseException) -> bool:
    """Return whether an error of CUDA, of CuPy or of torch means that the device is lost."""
    return isinstance(error, DeviceLostError) or any(words in str(error) for words in _LASTING)


def lost_error(
    error: BaseException, what: str, where: str, *, offset: int | None = None
) -> DeviceLostError:
    """Return the error to raise if `is_lost` is true for `error`.

    `what` is the operation that failed, and `where` the path of a file or the name of a device.
    """
    if isinstance(error, DeviceLostError):
        return error
    said = " ".join(str(error).split("\n", 1)[0].split())
    return DeviceLostError(
        errno.ENODEV,
        f"{what}: the GPU is lost to this process ({said}); its checkpoints are not affected: "
        "end the process, look for 'NVRM: Xid' in the kernel's log, and resume in a new one;",
        where,
        offset=offset,
    )


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


class Handle:
    """A stream given by its raw handle, with the one attribute that CuPy reads.

    CuPy's own class for such streams is being removed.
    """

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


class DeviceMemory:
    """A separate allocation at the device address `ptr`, freed when the object is collected."""

    def __init__(self, cuda: Cuda, ptr: int) -> None:
        self.ptr = ptr
        weakref.finalize(self, cuda._free, ptr).atexit = False


class Cuda:
    """One device, with a private stream for copies in each direction.

    Both streams are non-blocking: they never wait for the default stream, on which most training
    runs, and it never waits for them. All methods may be called from several threads at once.
    """

    def __init__(self, device: int | None = None) -> None:
        """Use a device, by default the current one of this thread.

        Raises:
            RefusedError: CuPy or the driver is missing, or the device does not exist.
        """
        cupy = require("cupy")
        self._cuda = cupy.cuda
        self._runtime = cupy.cuda.runtime
        try:
            self.device = int(self._runtime.getDevice() if device is None else device)
            self._streams: dict[CopyDirection, Any] = {
                "to device": self.new_stream(),
                "to host": self.new_stream(),
            }
        except RuntimeError as error:
            which = "no GPU can be used" if device is None else f"GPU {device} cannot be used"
            raise RefusedError(
                f"{which}: {error}; nvidia-smi lists the GPUs of this machine, and "
                "CUDA_VISIBLE_DEVICES may hide some of them. For host memory alone, use "
                "PosixBackend"
            ) from error
        self._locks = {direction: threading.Lock() for direction in self._streams}

    def pci_bus_id(self) -> str:
        """Return the device's address on the PCI bus, such as ``0000:41:00.0``."""
        return str(self._runtime.deviceGetPCIBusId(self.device))

    def allocate(self, nbytes: int) -> DeviceMemory:
        """Return `nbytes` bytes of uninitialised memory, as a separate allocation outside any pool.

        cuFile registers whole allocations. An allocation of a pool would also hold the memory of
        other users.

        Raises:
            DeviceMemoryError: The device has no free range of that length.
            DeviceLostError: The device does not work any more.
        """
        try:
            return DeviceMemory(self, self.here(lambda: int(self._runtime.malloc(nbytes))))
        except RuntimeError as error:
            if is_lost(error):
                raise lost_error(error, f"allocate {nbytes} bytes", self.name) from error
            raise DeviceMemoryError(
                f"cannot allocate {nbytes} bytes ({nbytes / (1 << 30):.3g} GiB) on {self.name}: "
                f"{error}; nvidia-smi shows who uses its memory"
            ) from error

    @property
    def name(self) -> str:
        """Name of the device for messages, as torch writes it."""
        return f"cuda:{self.device}"

    def zero(self, address: int, nbytes: int) -> None:
        """Set a range of device memory to zeros; it is done on return."""
        self._run("to device", lambda ptr: self._runtime.memsetAsync(address, 0, nbytes, ptr))

    def copy(self, target: int, source: int, nbytes: int, direction: CopyDirection) -> None:
        """Copy between addresses of the host and the device; the bytes have arrived on return."""
        kind = (
            self._runtime.memcpyHostToDevice
            if direction == "to device"
            else self._runtime.memcpyDeviceToHost
        )
        self._run(
            direction, lambda ptr: self._runtime.memcpyAsync(target, source, nbytes, kind, ptr)
        )

    def pin(self, address: int, nbytes: int) -> None:
        """Page-lock a range of host memory, so that the device copies it at full speed."""
        self.here(lambda: self._runtime.hostRegister(address, nbytes, _REGISTER_PORTABLE))

    def unpin(self, address: int) -> None:
        """Undo `pin` of the range that starts at `address`."""
        self.here(lambda: self._runtime.hostUnregister(address))

    def record(self, stream: int) -> Event:
        """Return an event that follows all work queued by now on a stream, given by its handle."""
        return self.here(lambda: self._recorded(Handle(stream)))

    def new_stream(self) -> Any:
        """Return a new non-blocking stream, with the attribute `ptr`."""
        # Non-blocking: copies do not wait for the legacy default stream, torch's default.
        return self.here(lambda: self._cuda.Stream(non_blocking=True))

    def use(self) -> None:
        """Make the device and its context current in the calling thread, permanently.

        cuFile needs that, and unlike CUDA's runtime does not do it itself, even for the device that
        a thread begins with. Call it only from threads of this package, or within `here`.
        """
        self._runtime.setDevice(self.device)

    def _run(self, direction: CopyDirection, queue: Callable[[int], object]) -> None:
        """Put work on the stream of a direction, and wait for its end."""

        def call() -> None:
            # The wait is outside the lock, so that copies of several threads overlap.
            with self._locks[direction]:
                stream = self._streams[direction]
                queue(stream.ptr)
                event = self._recorded(stream)
            event.synchronize()

        self.here(call)

    def _recorded(self, stream: Any) -> Event:
        """Return a new event, recorded on a stream. The device must be current."""
        # Blocking: a waiting thread sleeps. Spinning would take a core from the training.
        event: Any = self._cuda.Event(block=True, disable_timing=True)
        event.record(stream)
        recorded: Event = event
        return recorded

    def _free(self, address: int) -> None:
        """Free an allocation; errors of a driver that is lost or shutting down are ignored."""
        with contextlib.suppress(RuntimeError):
            self.here(lambda: self._runtime.free(address))

    def here(self, call: Callable[[], Result]) -> Result:
        """Return the result of a call that is made while the device is current.

        If another device is current in this thread, a thread made for the call makes it: it may
        keep the device until its end.
        """
        if int(self._runtime.getDevice()) == self.device:
            return call()
        results: list[Result] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                self._runtime.setDevice(self.device)
                results.append(call())
            except BaseException as error:  # noqa: BLE001 - raised again by the caller
                errors.append(error)

        thread = threading.Thread(target=work, name="gds-device", daemon=True)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return results[0]
