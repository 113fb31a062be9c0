"""Buffers that a GPU can reach: memory of the device, page-locked host memory, torch's tensors."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final

from gds.buffers.cuda import Cuda, Event
from gds.buffers.host import HostBuffer, check_slice
from gds.contract import ALIGNMENT, Buffer, BufferKind

Release = Callable[["DeviceBytes"], None]
"""Undoes a registration, while the memory still exists."""


class DeviceBytes:
    """A range of device memory as CUDA libraries take it: unsigned bytes, whatever they hold.

    Element types do not matter to a transfer, and not every library knows all of them
    (``bfloat16`` has none in ``__cuda_array_interface__``).
    """

    __slots__ = ("address", "nbytes")

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3, contiguous, without a stream: ordering is the caller's."""
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "strides": None,
            "version": 3,
        }


class Region:
    """An allocation, or a tensor's memory: what keeps it alive, and what it has to wait for."""

    def __init__(self, cuda: Cuda, owner: object, address: int, nbytes: int) -> None:
        """Hold on to `owner`, whose memory this is."""
        self.cuda = cuda
        self.bytes = DeviceBytes(address, nbytes)
        self._owner = owner
        self._lock = threading.Lock()
        self._events: list[tuple[int, int, int, Event]] = []

    def released_by(self, release: Release) -> None:
        """Have `release` called with the bytes when this goes, before the memory does."""
        weakref.finalize(self, _release, release, self.bytes, self._owner).atexit = False

    def add_event(self, start: int, stop: int, stream: int, event: Event) -> None:
        """Have transfers that touch the addresses from `start` to `stop` wait for `event`."""
        with self._lock:
            # A stream works in order: its later event stands for the earlier ones in its range.
            self._events = [
                (first, last, other, noted)
                for first, last, other, noted in self._events
                if other != stream or first < start or last > stop
            ] + [(start, stop, stream, event)]

    def events(self, start: int, stop: int) -> list[Event]:
        """Return what a transfer of these addresses has to wait for."""
        with self._lock:
            return [noted[3] for noted in self._events if noted[0] < stop and start < noted[1]]

    def forget(self, events: list[Event]) -> None:
        """Drop events that have been waited for."""
        with self._lock:
            self._events = [noted for noted in self._events if noted[3] not in events]


class DeviceBuffer(DeviceBytes):
    """Device memory. A slice shares it, keeps it alive, and has the same work to wait for.

    It has ``__cuda_array_interface__``, so that ``torch.as_tensor(buffer, device="cuda")`` and
    ``cupy.asarray(buffer)`` are views of it.
    """

    __slots__ = ("__weakref__", "region")

    def __init__(self, region: Region, address: int, nbytes: int) -> None:
        super().__init__(address, nbytes)
        self.region = region

    @property
    def kind(self) -> BufferKind:
        """Always ``"device"``."""
        return "device"

    def slice(self, start: int, nbytes: int) -> DeviceBuffer:
        """Return the `nbytes` bytes from `start`, sharing this memory.

        Raises:
            ValueError: The range is not within this buffer.
        """
        check_slice(start, nbytes, self.nbytes)
        return DeviceBuffer(self.region, self.address + start, nbytes)

    def after(self, stream: int) -> None:
        """Have transfers that are started from now on wait for what is queued on a stream by now.

        Call it when a kernel has been launched that writes what is to be written to a file, or
        that still reads what is to be overwritten by a read. It costs an event, and waits for
        nothing: the transfer's thread does. The other way needs no call: once a transfer's future
        has resolved, kernels launched on any stream see its bytes.

        Args:
            stream: Its raw handle: ``torch.cuda.current_stream().cuda_stream``.
        """
        event = self.region.cuda.record(stream)
        self.region.add_event(self.address, self.address + self.nbytes, stream, event)

    def upload(self, data: bytes | bytearray | memoryview, offset: int = 0) -> None:
        """Copy bytes of the host to `offset` (bytes) of this buffer, now. For small things."""
        target = self.slice(offset, len(data))
        if target.nbytes:
            source = (ctypes.c_char * target.nbytes).from_buffer_copy(data)
            address = ctypes.addressof(source)
            self.region.cuda.copy(target.address, address, target.nbytes, "to device")

    def download(self) -> bytes:
        """Return a copy of the bytes, now. For small things."""
        target = ctypes.create_string_buffer(max(self.nbytes, 1))
        if self.nbytes:
            address = ctypes.addressof(target)
            self.region.cuda.copy(address, self.address, self.nbytes, "to host")
        return target.raw[: self.nbytes]

    def memoryview(self) -> memoryview:
        """Raise `TypeError`: the host cannot address this memory."""
        raise TypeError("memory of a device has no view; use upload() and download(), or CuPy")

    def __repr__(self) -> str:
        return f"DeviceBuffer({self.nbytes} bytes at {self.address:#x})"


class PinnedBuffer(HostBuffer):
    """Host memory as `HostBuffer` makes it, huge pages included, and page-locked.

    Registered once, when it is made, and until the last buffer, slice or view of it is gone.
    """

    __slots__ = ()

    def __init__(self, cuda: Cuda, nbytes: int) -> None:
        """Map and page-lock `nbytes` bytes.

        Raises:
            RuntimeError: CUDA refuses to lock so much.
        """
        super().__init__(nbytes)
        if not nbytes:
            return
        address, unpinned = self._address, self._view
        cuda.pin(address, nbytes)
        # A view of an object that can be told when nobody looks at the memory any more: a tensor
        # may live on when all buffers are gone.
        array = (ctypes.c_ubyte * nbytes).from_address(address)
        weakref.finalize(array, _unpin, cuda, address, unpinned).atexit = False
        self._view = memoryview(array).cast("B")

    @property
    def kind(self) -> BufferKind:
        """Always ``"pinned"``."""
        return "pinned"


class _TensorMemory(HostBuffer):
    """Host memory of somebody else's."""

    __slots__ = ("_is_pinned",)

    def __init__(self, address: int, nbytes: int, owner: object, *, is_pinned: bool) -> None:
        array = (ctypes.c_ubyte * nbytes).from_address(address)
        array.owner = owner  # type: ignore[attr-defined]
        self._address = address
        self._view = memoryview(array).cast("B")
        self._is_pinned = is_pinned

    @property
    def kind(self) -> BufferKind:
        """Page-locked or not, as it was when this was made."""
        return "pinned" if self._is_pinned else "host"

    def slice(self, start: int, nbytes: int) -> _TensorMemory:
        part = super().slice(start, nbytes)
        part._is_pinned = self._is_pinned
        return part


def device_buffer(cuda: Cuda, nbytes: int) -> DeviceBuffer:
    """Return zeroed memory of the device, aligned to `ALIGNMENT`, an allocation of its own.

    Raises:
        ValueError: `nbytes` is negative.
        MemoryError: The device has no such range to give.
    """
    if nbytes < 0:
        raise ValueError(f"a buffer cannot have {nbytes} bytes")
    # CUDA aligns to 256 bytes; whole blocks, so that a direct transfer of the last one fits.
    whole = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
    memory = cuda.allocate(whole + ALIGNMENT)
    address = memory.ptr + -memory.ptr % ALIGNMENT
    cuda.zero(address, whole)
    return DeviceBuffer(Region(cuda, memory, address, whole), address, nbytes)


def tensor_buffer(tensor: Any, cuda: Cuda | None = None) -> Buffer:
    """Return a torch tensor's memory as a buffer, of whatever type its elements are.

    The buffer keeps the tensor alive. Its memory is never registered: it belongs to torch's
    allocator, and registration would lock all of a segment. Allocate buffers, and make tensors of
    them, for what is transferred again and again.

    Args:
        tensor: Contiguous, of the CPU or of `cuda`'s device.
        cuda: The device; needed for its tensors only.

    Raises:
        ValueError: The tensor is not contiguous, sparse, or of another device.
    """
    if str(tensor.layout) != "torch.strided" or not tensor.is_contiguous():
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} is not contiguous, and a transfer needs one "
            "range of memory: pass tensor.contiguous(), or its parts"
        )
    tensor = tensor.detach()
    address, nbytes = int(tensor.data_ptr()), int(tensor.numel() * tensor.element_size())
    device = str(tensor.device.type)
    if device == "cpu":
        if not nbytes:
            return HostBuffer(0)
        return _TensorMemory(address, nbytes, tensor, is_pinned=bool(tensor.is_pinned()))
    if device != "cuda" or cuda is None or tensor.device.index not in (None, cuda.device):
        here = "no GPU" if cuda is None else f"cuda:{cuda.device}"
        raise ValueError(f"a tensor on {tensor.device} cannot be moved by a backend of {here}")
    return DeviceBuffer(Region(cuda, tensor, address, nbytes), address, nbytes)


_TEARDOWN: Final = (RuntimeError, OSError)
"""What a driver raises that is being shut down, or that never recovered from an error."""


def _release(release: Release, bytes_: DeviceBytes, owner: object) -> None:
    with contextlib.suppress(*_TEARDOWN):
        release(bytes_)
    del owner  # only now


def _unpin(cuda: Cuda, address: int, memory: memoryview) -> None:
    with contextlib.suppress(*_TEARDOWN):
        cuda.unpin(address)
    del memory  # only now
