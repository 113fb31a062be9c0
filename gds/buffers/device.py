"""Buffers that a GPU can access: device memory, page-locked host memory, and torch's tensors."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final

from gds.buffers.cuda import Cuda, Event, is_lost, lost_error
from gds.buffers.host import HostBuffer, check_slice
from gds.contract import ALIGNMENT, Buffer, BufferKind
from gds.errors import RefusedError

Release = Callable[["DeviceBytes"], None]
"""Function that undoes a registration while the memory still exists."""


class PageLockRefused(UserWarning):
    """CUDA did not page-lock host memory, so copies between host and device are slower."""


class DeviceBytes:
    """A range of device memory in the form that CUDA libraries accept: contiguous unsigned bytes.

    The element type does not matter to a transfer, and not every library knows all types
    (``__cuda_array_interface__`` has no code for ``bfloat16``).
    """

    __slots__ = ("address", "nbytes")

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Array interface, version 3: contiguous bytes, no stream; the caller orders the work."""
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "strides": None,
            "version": 3,
        }


class Region:
    """An allocation or a tensor's memory, with its owner and the events that transfers wait for.

    All methods may be called from any thread.
    """

    def __init__(
        self, cuda: Cuda, owner: object, address: int, nbytes: int, *, base: int | None = None
    ) -> None:
        """Describe memory of `owner`, and keep it alive; its allocation starts at `base`."""
        self.cuda = cuda
        self.base = address if base is None else base
        """Device address that cuFile knows registered memory by."""
        self.bytes = DeviceBytes(address, nbytes)
        self._owner = owner
        self._lock = threading.Lock()
        self._events: list[tuple[int, int, int, Event]] = []

    def released_by(self, release: Release) -> None:
        """Call `release` with the bytes when the region is collected, while the memory exists."""
        weakref.finalize(self, _release, release, self.bytes, self._owner).atexit = False

    def add_event(self, start: int, stop: int, stream: int, event: Event) -> None:
        """Make transfers that touch the addresses from `start` to `stop` wait for `event`."""
        with self._lock:
            # A stream works in order: its new event replaces the earlier ones within the range.
            self._events = [
                (first, last, other, noted)
                for first, last, other, noted in self._events
                if other != stream or first < start or last > stop
            ] + [(start, stop, stream, event)]

    def events(self, start: int, stop: int) -> list[Event]:
        """Return the events that a transfer of the addresses from `start` to `stop` waits for."""
        with self._lock:
            return [noted[3] for noted in self._events if noted[0] < stop and start < noted[1]]

    def forget(self, events: list[Event]) -> None:
        """Drop events that a transfer has waited for."""
        with self._lock:
            self._events = [noted for noted in self._events if noted[3] not in events]


class DeviceBuffer(DeviceBytes):
    """A buffer of device memory. A slice shares the memory and its events, and keeps it alive.

    ``torch.as_tensor(buffer, device="cuda")`` and ``cupy.asarray(buffer)`` are views of the
    memory, through ``__cuda_array_interface__``.
    """

    __slots__ = ("__weakref__", "region")

    def __init__(self, region: Region, address: int, nbytes: int) -> None:
        super().__init__(address, nbytes)
        self.region = region

    @property
    def kind(self) -> BufferKind:
        """Kind of the memory, which is always ``"device"``."""
        return "device"

    def slice(self, start: int, nbytes: int) -> DeviceBuffer:
        """Return a buffer of `nbytes` bytes from `start`, which shares this memory.

        Raises:
            ValueError: The range is not within this buffer.
        """
        check_slice(start, nbytes, self.nbytes)
        return DeviceBuffer(self.region, self.address + start, nbytes)

    def after(self, stream: int) -> None:
        """Make later transfers of this memory wait for all work queued on a stream by now.

        Call it after the launch of a kernel that writes this memory, before the memory is written
        to a file. Call it also after the launch of a kernel that reads this memory, before a read
        overwrites it. The call records an event and does not wait; the thread of the transfer
        waits. The opposite order needs no call: when a transfer's future has resolved, kernels
        launched on any stream see its bytes.

        Args:
            stream: Raw handle of the stream: ``torch.cuda.current_stream().cuda_stream``.
        """
        event = self.region.cuda.record(stream)
        self.region.add_event(self.address, self.address + self.nbytes, stream, event)

    def upload(self, data: bytes | bytearray | memoryview, offset: int = 0) -> None:
        """Copy bytes from the host to `offset` (bytes) of this buffer; for small data.

        The copy is done on return.

        Raises:
            ValueError: The range is not within this buffer.
        """
        target = self.slice(offset, len(data))
        if target.nbytes:
            source = (ctypes.c_char * target.nbytes).from_buffer_copy(data)
            address = ctypes.addressof(source)
            self.region.cuda.copy(target.address, address, target.nbytes, "to device")

    def download(self) -> bytes:
        """Return a copy of the bytes in host memory; for small data."""
        target = ctypes.create_string_buffer(max(self.nbytes, 1))
        if self.nbytes:
            address = ctypes.addressof(target)
            self.region.cuda.copy(address, self.address, self.nbytes, "to host")
        return target.raw[: self.nbytes]

    def memoryview(self) -> memoryview:
        """Raise `TypeError`: the host cannot address this memory."""
        raise TypeError("device memory has no host view; use upload() and download(), or CuPy")

    def __repr__(self) -> str:
        return f"DeviceBuffer({self.nbytes} bytes at {self.address:#x})"


class PinnedBuffer(HostBuffer):
    """A buffer of page-locked host memory, allocated like `HostBuffer` (huge pages included).

    The memory is page-locked once, when it is made, and stays so until the last buffer, slice or
    view of it is collected.
    """

    __slots__ = ()

    def __init__(self, cuda: Cuda, nbytes: int) -> None:
        """Map and page-lock `nbytes` bytes.

        Raises:
            MemoryError: The system has no free range of that length.
            RefusedError: CUDA refuses to lock that much memory.
            DeviceLostError: The device does not work any more.
        """
        super().__init__(nbytes)
        if not nbytes:
            return
        address, unpinned = self._address, self._view
        try:
            cuda.pin(address, nbytes)
        except RuntimeError as error:
            if is_lost(error):
                raise lost_error(error, f"page-lock {nbytes} bytes", cuda.name) from error
            raise RefusedError(
                f"CUDA does not page-lock {nbytes} bytes of host memory for {cuda.name} ({error}): "
                "some sandboxes forbid it, and ulimit -l may limit it. Copies between the device "
                'and memory that is not locked (kind "host") are right, but slower'
            ) from error
        # The array is collected after the last view of the memory, and then unlocks it. A tensor
        # made from a view may outlive all buffers.
        array = (ctypes.c_ubyte * nbytes).from_address(address)
        weakref.finalize(array, _unpin, cuda, address, unpinned).atexit = False
        self._view = memoryview(array).cast("B")

    @property
    def kind(self) -> BufferKind:
        """Kind of the memory, which is always ``"pinned"``."""
        return "pinned"


class _TensorMemory(HostBuffer):
    """A buffer over host memory that another object owns, such as a tensor, and keeps alive."""

    __slots__ = ("_is_pinned",)

    def __init__(self, address: int, nbytes: int, owner: object, *, is_pinned: bool) -> None:
        array = (ctypes.c_ubyte * nbytes).from_address(address)
        array.owner = owner  # type: ignore[attr-defined]
        self._address = address
        self._view = memoryview(array).cast("B")
        self._is_pinned = is_pinned

    @property
    def kind(self) -> BufferKind:
        return "pinned" if self._is_pinned else "host"

    def slice(self, start: int, nbytes: int) -> _TensorMemory:
        part = super().slice(start, nbytes)
        part._is_pinned = self._is_pinned
        return part


def device_buffer(cuda: Cuda, nbytes: int) -> DeviceBuffer:
    """Return zeroed device memory as a separate allocation, aligned to `ALIGNMENT` bytes."""
    if nbytes < 0:
        raise ValueError(f"a buffer cannot have {nbytes} bytes")
    # The length is rounded up to whole blocks, so that a direct transfer of the last block fits.
    whole = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
    memory = cuda.allocate(whole)
    if memory.ptr % ALIGNMENT:
        # CUDA only promises 256 bytes. It aligns large allocations to pages of 2 MiB, of which a
        # spare block would often take one more.
        del memory
        memory = cuda.allocate(whole + ALIGNMENT)
    address = memory.ptr + -memory.ptr % ALIGNMENT
    cuda.zero(address, whole)
    return DeviceBuffer(Region(cuda, memory, address, whole, base=memory.ptr), address, nbytes)


def tensor_buffer(tensor: Any, cuda: Cuda | None = None) -> Buffer:
    """Return a torch tensor's memory as a buffer; the tensor may have any dtype and shape.

    The buffer keeps the tensor alive. Its memory is never registered: it belongs to torch's
    allocator, and registration would lock a whole segment. For memory that is transferred
    repeatedly, allocate buffers and make tensors from them.

    Args:
        tensor: A contiguous tensor on the CPU or on the device of `cuda`.
        cuda: The device; needed only for tensors on a device.

    Raises:
        ValueError: The tensor is sparse, not contiguous, or on another device.
    """
    if str(tensor.layout) != "torch.strided" or not tensor.is_contiguous():
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} is not contiguous, but a transfer needs one "
            "range of memory: pass tensor.contiguous(), or contiguous parts of it"
        )
    tensor = tensor.detach()
    address, nbytes = int(tensor.data_ptr()), int(tensor.numel() * tensor.element_size())
    device = str(tensor.device.type)
    if device == "cpu":
        if not nbytes:
            return HostBuffer(0)
        return _TensorMemory(address, nbytes, tensor, is_pinned=bool(tensor.is_pinned()))
    if device != "cuda" or cuda is None or tensor.device.index not in (None, cuda.device):
        here = "without a GPU" if cuda is None else f"of cuda:{cuda.device}"
        raise ValueError(f"a tensor on {tensor.device} cannot be transferred by a backend {here}")
    return DeviceBuffer(Region(cuda, tensor, address, nbytes), address, nbytes)


_TEARDOWN: Final = (RuntimeError, OSError)
"""Errors of a driver that is shutting down, or that has not recovered from an earlier error."""


def _release(release: Release, bytes_: DeviceBytes, owner: object) -> None:
    """Undo a registration. `owner` keeps the memory alive until then."""
    with contextlib.suppress(*_TEARDOWN):
        release(bytes_)
    del owner  # the memory must outlive its registration


def _unpin(cuda: Cuda, address: int, memory: memoryview) -> None:
    """Unlock page-locked memory. `memory` keeps it mapped until then."""
    with contextlib.suppress(*_TEARDOWN):
        cuda.unpin(address)
    del memory  # the mapping must outlive the page lock
