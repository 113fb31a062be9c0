"""Hooks that move each gradient out of the device as soon as backward has made it.

Copies from a device run behind backward, on the device's own stream for them. At most
`_IN_FLIGHT_BYTES` of gradients are on their way; a hook that finds more waits for the oldest. What
is left of the work (adding, taking a norm, writing to the drive) is done by the next hook, or by
whoever needs a value first. So there is no thread whose modes could change a bit.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from sys import getrefcount
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from gds import Backend, StorageError
from offload.ambient import neutral
from offload.device.boundary import Boundary, Event, boundary_of, is_on_device
from offload.gradients.homes import DriveHome, MemoryHome
from offload.gradients.outside import OutsideGradient
from offload.gradients.spill import Spill

_IN_FLIGHT_BYTES = 256 << 20

_MIN_SPILLED_BYTES = 64 << 10
"""Smaller gradients stay in host memory: a drive takes as long for them as for so many bytes."""


@dataclass(slots=True, eq=False)
class _Copy:
    """A copy from a device that is in progress."""

    boundary: Boundary
    event: Event
    source: torch.Tensor
    """The gradient on the device, whose memory must not be freed before the copy has ended."""
    host: torch.Tensor
    arrived: Callable[[torch.Tensor], object] | None
    """Function that takes the values when they are in host memory."""


class GradientMover:
    """Moves the gradients of an optimizer's parameters out of their device.

    Args:
        kind: Where the gradients go: ``"host"`` or ``"drive"``.
        drives: Backend and directory of each drive, for ``"drive"``.
        groups: ``param_groups`` of the optimizer.

    Raises:
        gds.StorageError: A drive has no room for the gradients.
    """

    def __init__(
        self,
        kind: Literal["host", "drive"],
        drives: Sequence[tuple[Backend, str]],
        groups: Iterable[Mapping[str, Any]],
    ) -> None:
        self._lock = threading.RLock()
        self._copies: deque[_Copy] = deque()
        self._copying_bytes = 0
        self._handles: dict[int, tuple[weakref.ref[torch.Tensor], Any]] = {}
        self._alone = torch.empty(1, dtype=torch.float32, device="cpu")
        self._alone.grad = torch.empty(1, dtype=torch.float32, device="cpu")
        self.spill: Spill | None = None
        if kind == "drive":
            nbytes = sum(p.nbytes for group in groups for p in group["params"])
            self.spill = Spill(drives, nbytes)
            self.spill.require_space()
        self.attach(groups)

    def attach(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Put hooks on parameters that have none so far."""
        hook = _Hook(self)
        for group in groups:
            for parameter in group["params"]:
                known = self._handles.get(id(parameter))
                if parameter.requires_grad and (known is None or known[0]() is not parameter):
                    handle = parameter.register_post_accumulate_grad_hook(hook)
                    self._handles[id(parameter)] = weakref.ref(parameter), handle

    def moved(self, parameter: torch.Tensor) -> None:
        """Move the gradient of a parameter, unless it must stay where it is.

        It stays if it is sparse, part of a graph, or sharded; if it is where it would go; or if
        the program has more references to its memory, such as a buffer for several gradients,
        since what is written through them must reach the step.
        """
        gradient = parameter.grad
        if (
            gradient is None
            or isinstance(gradient, OutsideGradient)
            or gradient.requires_grad
            or gradient.layout != torch.strided
            or not gradient.numel()
            or not (is_on_device(gradient) or self._is_spilled(gradient))
            or is_traceable_wrapper_subclass(gradient)
        ):
            return
        alone = self._alone.grad  # counted in the same way, for comparison
        if _owners(gradient) != _owners(alone):
            return
        with neutral(keep_denormals=True), self._lock:
            parameter.grad = OutsideGradient(gradient, self._home(gradient.detach()))

    def settle(self) -> None:
        """Wait for all copies from devices, and do what is to be done with them."""
        with self._lock:
            while self._copies:
                self._end_oldest()

    def close(self) -> None:
        """Remove the hooks, and free the space on the drives. Idempotent.

        Gradients in host memory stay usable.
        """
        for _, handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        with self._lock:
            while self._copies:
                with contextlib.suppress(StorageError):  # nobody can read that gradient any more
                    self._end_oldest()
        if self.spill is not None:
            self.spill.close()

    def _is_spilled(self, gradient: torch.Tensor) -> bool:
        is_large = gradient.nbytes >= _MIN_SPILLED_BYTES
        return self.spill is not None and is_large and gradient.is_contiguous()

    def _home(self, gradient: torch.Tensor) -> MemoryHome | DriveHome:
        if not is_on_device(gradient):
            home = self._drive_home(gradient, norm=None)
            home.write(gradient)
            return home
        norm = torch.linalg.vector_norm(gradient, 2.0)
        if not self._is_spilled(gradient):
            host = self._begin(gradient, None)
            return MemoryHome(host, self.settle, norm=norm, add=self._add)
        home = self._drive_home(gradient, norm=norm)
        self._begin(gradient, home.write)
        return home

    def _drive_home(self, gradient: torch.Tensor, norm: torch.Tensor | None) -> DriveHome:
        if self.spill is None:
            raise RuntimeError("gradients do not go to the drive")
        region, shape = self.spill.region(gradient.nbytes), gradient.shape
        return DriveHome(region, shape, gradient.dtype, self.settle, norm=norm, add=self._add)

    def _add(self, other: torch.Tensor, add: Callable[[torch.Tensor], object]) -> None:
        """Begin to add a tensor of a device to values in host memory or on the drive."""
        with neutral(keep_denormals=True), self._lock:
            self._begin(other.detach(), add)

    def _begin(
        self, source: torch.Tensor, arrived: Callable[[torch.Tensor], object] | None
    ) -> torch.Tensor:
        """Begin a copy from a device, and return the host memory that it fills."""
        boundary = boundary_of(source.device)
        after = [boundary.now()]
        flat = source.view(-1) if source.is_contiguous() else boundary.flatten(source, after)
        host = boundary.allocate(source.nbytes).view(source.dtype)
        event = boundary.fetch([(flat, host)], after)
        host = host.view(source.shape)
        self._copies.append(_Copy(boundary, event, flat, host, arrived))
        self._copying_bytes += source.nbytes
        while self._copying_bytes > _IN_FLIGHT_BYTES and len(self._copies) > 1:
            self._end_oldest()
        return host

    def _end_oldest(self) -> None:
        copy = self._copies[0]
        copy.boundary.wait(copy.event)  # an interrupt here loses nothing
        self._copies.popleft()
        self._copying_bytes -= copy.host.nbytes
        if copy.arrived is not None:
            copy.arrived(copy.host)


def _owners(gradient: torch.Tensor | None) -> tuple[int, int]:
    """Count what refers to a gradient and to its memory, including what exists for counting."""
    if gradient is None:
        return 0, 0
    storage: Any = gradient.untyped_storage()
    count: Any = torch._C._storage_Use_Count
    return getrefcount(gradient), count(storage._cdata)


class _Hook:
    """A hook that does not keep the mover alive."""

    def __init__(self, mover: GradientMover) -> None:
        self._mover = weakref.ref(mover)

    def __call__(self, parameter: torch.Tensor) -> None:
        mover = self._mover()
        if mover is not None:
            mover.moved(parameter)
