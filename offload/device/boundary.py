"""The boundary between host memory and a device that holds parameters and gradients.

Only this module and `compute` touch memory of a device. Bytes cross on two streams for each device,
created once: one towards the host, one towards the device. Only events order these streams with
those of the training loop. No stream is ever synchronised as a whole.

    training stream  ...backward) now |                                    fence| next forward
    to the host                       |- fetch chunk 0 -|- fetch chunk 1 -|     |
    host threads                                        |- update chunk 0 -|... |
    to the device                                                          |- send chunk 0 ...|
"""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch

from gds.buffers.cuda import is_lost, lost_error
from gds.buffers.device import PageLockRefused
from gds.errors import DeviceMemoryError

HOST = torch.device("cpu")

Event: TypeAlias = Any
"""A point in the work of a device. Each boundary has its own class of events."""

Marks: TypeAlias = Mapping[torch.device, Event]
"""A point in the work of each of several devices."""

Copies: TypeAlias = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Pairs of source and target, of the same dtype and number of elements, both contiguous."""


PRIORITY: Final = -1
"""Priority of our streams: higher than that of training, whose wide kernels would hold up short
updates that a step waits for. To copies between host and device it makes no difference."""

_cuda: Any = torch.cuda  # torch.cuda has only partial types


class Boundary:
    """Moves bytes between one CUDA device and host memory. Safe for several threads.

    Torch calls ROCm devices ``cuda`` as well.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._to_host: torch.cuda.Stream = _cuda.Stream(device, priority=PRIORITY)
        self._to_device: torch.cuda.Stream = _cuda.Stream(device, priority=PRIORITY)
        self._sent: torch.cuda.Event | None = None
        self._lock = threading.Lock()

    def now(self) -> torch.cuda.Event:
        """Return the present end of the work on the calling thread's current stream."""
        return _record(torch.cuda.current_stream(self._device))

    def fetch(self, copies: Copies, after: Iterable[Event]) -> torch.cuda.Event:
        """Begin copies to the host, after the given points and after all earlier sends.

        The sources must not be freed before a `wait` for the returned end of the copies.
        """
        with self._lock, self._on(self._to_host, "copy to the host"):
            self._order_fetch(after)
            for source, into in copies:
                into.copy_(source, non_blocking=True)
            return _record(self._to_host)

    def send(self, copies: Copies, after: Iterable[Event]) -> torch.cuda.Event:
        """Begin copies to the device, in the given order, after the given points.

        A source may be on the device, too. The sources must not change before the returned end of
        the copies is reached.
        """
        with self._lock, self._on(self._to_device, "copy from the host"):
            for event in after:
                self._to_device.wait_event(event)
            for source, into in copies:
                into.copy_(source, non_blocking=True)
            self._sent = event = _record(self._to_device)
            return event

    def flatten(self, tensor: torch.Tensor, after: Iterable[Event]) -> torch.Tensor:
        """Return a contiguous, flat copy on the device, for `fetch` and `send`."""
        with self._lock, self._on(self._to_host, "copy a tensor that is not contiguous"):
            self._order_fetch(after)
            flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
            flat.record_stream(self._to_device)
            return flat

    def wait(self, event: torch.cuda.Event) -> None:
        """Block the calling thread, without the GIL, until a point is reached."""
        with named_errors(self._device, "wait for copies"):
            event.synchronize()

    def fence(self) -> None:
        """Make the calling thread's current stream wait for everything that was sent."""
        sent = self._sent
        if sent is not None:
            torch.cuda.current_stream(self._device).wait_event(sent)

    def follow(self, event: torch.cuda.Event) -> None:
        """Make the calling thread's current stream wait for a point."""
        torch.cuda.current_stream(self._device).wait_event(event)

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return memory on the device as bytes. It may be used after the present point."""
        with named_errors(self._device, "allocate a buffer"):
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return page-locked host memory as bytes, from torch's pool, which copies keep alive."""
        return pinned((nbytes,), torch.uint8, self._device)

    def held_bytes(self, nbytes: int) -> int:
        """Return how much memory `allocate` takes at most: the next power of two of the bytes."""
        return 1 << (nbytes - 1).bit_length() if nbytes else 0

    def lock_pages(self, memory: torch.Tensor) -> object:
        """Page-lock host memory, for as long as the returned object is referenced.

        If the driver refuses, copies are correct but slower.
        """
        with torch.cuda.device(self._device):
            return _Registered(memory, self._device)

    @contextlib.contextmanager
    def _on(self, stream: torch.cuda.Stream, what: str) -> Iterator[None]:
        """Make a stream the current one; errors say what was done."""
        # The device is made current first. If another one is, the end of `torch.cuda.stream` would
        # switch back to it for good, and make a context there, which takes memory.
        with (
            named_errors(self._device, what),
            torch.cuda.device(self._device),
            torch.cuda.stream(stream),
        ):
            yield

    def _order_fetch(self, after: Iterable[Event]) -> None:
        for event in after:
            self._to_host.wait_event(event)
        if self._sent is not None:
            self._to_host.wait_event(self._sent)


class _Registered:
    """Host memory that the driver has page-locked. It is unlocked before it is unmapped."""

    def __init__(self, memory: torch.Tensor, device: torch.device) -> None:
        refused = int(_cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 1))
        if refused:  # in some sandboxes, or because the memory is locked for another device
            _forget_error(device)
        else:
            weakref.finalize(self, _unregister, memory, device)  # keeps the memory until then


def _forget_error(device: torch.device) -> None:
    """Clear CUDA's last error, which torch would report after this thread's next kernel."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, dtype=torch.uint8, device=device)


def _unregister(memory: torch.Tensor, device: torch.device) -> None:
    # On another device, this would make a context, which takes memory there. A device that is lost,
    # or a driver that is shutting down, has nothing left to undo.
    with contextlib.suppress(RuntimeError), torch.cuda.device(device):
        _cuda.cudart().cudaHostUnregister(memory.data_ptr())


def _record(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event: torch.cuda.Event = _cuda.Event(blocking=True)  # a waiting thread uses no core
    event.record(stream)
    return event


@contextlib.contextmanager
def named_errors(device: torch.device, what: str) -> Iterator[None]:
    """Raise errors of CUDA within the block as the errors that callers know."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DeviceMemoryError(
            f"{what}: {device} has no memory left ({str(error).splitlines()[0]}): use smaller "
            "chunks (chunk_bytes), fewer of them (ring_chunks, device_memory), or "
            'placement="host"'
        ) from error
    except RuntimeError as error:
        if is_lost(error):
            raise lost_error(error, what, str(device)) from error
        raise


def pinned(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return page-locked host memory for copies from or to a device.

    If the driver refuses, it returns memory that is not locked, and warns: copies are then correct
    but slower.

    Raises:
        DeviceLostError: The device does not work any more.
    """
    try:
        with torch.cuda.device(device):
            return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)
    except RuntimeError as error:
        if is_lost(error):
            raise lost_error(error, "page-lock host memory", str(device)) from error
        _forget_error(device)
        warnings.warn(
            f"CUDA does not page-lock host memory for {device} ({str(error).splitlines()[0]}): "
            "copies between host and device are right, but slower",
            PageLockRefused,
            stacklevel=2,
        )
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")


BOUNDARIES: dict[str, Callable[[torch.device], Boundary]] = {"cuda": Boundary}
"""Constructors of boundaries, by type of device."""

_made: dict[torch.device, Boundary] = {}
_making = threading.Lock()


def boundary_of(device: torch.device) -> Boundary:
    """Return the boundary of a device: always the same object, so that streams are made once."""
    with _making:
        if device not in _made:
            _made[device] = BOUNDARIES[device.type](device)
        return _made[device]


def is_on_device(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is outside of host memory."""
    return tensor.device.type != "cpu"


def is_reachable(device: torch.device) -> bool:
    """Return whether this library supports parameters on a device."""
    return device.type == "cpu" or device.type in BOUNDARIES


def marks_of(tensors: Iterable[torch.Tensor | None]) -> Marks:
    """Return the present point of every device that holds at least one of these tensors."""
    devices = {t.device for t in tensors if t is not None and is_on_device(t)}
    return {device: boundary_of(device).now() for device in devices}


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a small tensor's present value in host memory; waits until it is computed."""
    if not is_on_device(tensor):
        return tensor
    boundary = boundary_of(tensor.device)
    out = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    boundary.wait(boundary.fetch([(tensor.detach().contiguous(), out)], [boundary.now()]))
    return out
