"""Places that buffers of units are in: host memory, or a device behind its boundary."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from typing import Protocol

import torch

from offload.device.boundary import HOST, Event, boundary_of, to_host
from offload.device.staging import Traffic


class Place(Protocol):
    """What is done with memory where buffers are. Points in time are None in host memory."""

    @property
    def nan(self) -> torch.Tensor:
        """Bytes that are a NaN in every floating dtype."""
        ...

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return new memory as bytes."""
        ...

    def fill(self, source: torch.Tensor, into: torch.Tensor, after: Iterable[Event]) -> Event:
        """Copy bytes of host memory, after some points; return the point when they are there."""
        ...

    def now(self) -> Event:
        """Return the present end of the work of the calling thread's current stream."""
        ...

    def follow(self, event: Event) -> None:
        """Let what the calling thread does next with a buffer wait for a point."""
        ...

    def wait_filled(self) -> None:
        """Wait until no `fill` that has begun reads host memory any more."""
        ...

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor's present value in host memory."""
        ...


class HostPlace:
    """Host memory: models that are trained on a CPU."""

    def __init__(self) -> None:
        self.nan = _nan()

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return new memory as bytes."""
        return torch.empty(nbytes, dtype=torch.uint8, device=HOST)

    def fill(self, source: torch.Tensor, into: torch.Tensor, after: Iterable[Event]) -> Event:  # noqa: ARG002
        """Copy bytes at once, on the calling thread alone, and without the GIL."""
        ctypes.memmove(into.data_ptr(), source.data_ptr(), source.nbytes)
        return None

    def now(self) -> Event:
        """Return None: everything has been done."""
        return None

    def follow(self, event: Event) -> None:
        """Do nothing."""

    def wait_filled(self) -> None:
        """Do nothing."""

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself."""
        return tensor.detach()


class DevicePlace:
    """Memory of a device. Copies run on a stream of their own, ordered by events.

    Args:
        device: The device.
        traffic: Counter of the bytes that cross.
    """

    def __init__(self, device: torch.device, traffic: Traffic) -> None:
        self._boundary = boundary_of(device)
        self._traffic = traffic
        self.nan, value = self.empty(_NAN_BYTES), _nan()
        self.fill(value, self.nan, [self.now()])
        self.wait_filled()

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return new memory as bytes."""
        return self._boundary.empty(nbytes)

    def fill(self, source: torch.Tensor, into: torch.Tensor, after: Iterable[Event]) -> Event:
        """Begin to copy bytes of page-locked memory."""
        self._traffic.sent(source.nbytes)
        points = [event for event in after if event is not None]
        self._filled = event = self._boundary.send([(source, into)], points)
        return event

    def now(self) -> Event:
        """Return the present end of the work of the calling thread's current stream."""
        return self._boundary.now()

    def follow(self, event: Event) -> None:
        """Make the calling thread's current stream wait for a point."""
        if event is not None:
            self._boundary.follow(event)

    def wait_filled(self) -> None:
        """Wait for the newest copy, which comes after all others."""
        self._boundary.wait(self._filled)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of the tensor's present value, which is waited for."""
        self._traffic.fetched(tensor.nbytes)
        return to_host(tensor)


_NAN_BYTES = 16
"""Size of the largest element."""


def _nan() -> torch.Tensor:
    return torch.full((_NAN_BYTES,), 0xFF, dtype=torch.uint8, device=HOST)


def place_of(device: torch.device, traffic: Traffic) -> Place:
    """Return the place of a device."""
    return HostPlace() if device.type == HOST.type else DevicePlace(device, traffic)


def pages(nbytes: int) -> torch.Tensor:
    """Return host memory as bytes, in pages of its own, so that a device may lock it."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return torch.frombuffer(mmap.mmap(-1, max(nbytes, 1), flags=flags), dtype=torch.uint8)[:nbytes]
