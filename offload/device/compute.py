"""Computation on a device that holds state: a stream, memory and kernels.

No other code in this package computes on a device. Work is queued on one stream, which is created
once. Events order the work after the points in the training's streams that it depends on. The
thread that queued the work waits for its end before memory of the frames, gradients or parameters
is used for anything else. So no stream is ever synchronised as a whole, and the training's streams
wait for nothing: training work that is launched after `wait` has returned comes after the update.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from gds import Buffer
from offload.device.boundary import PRIORITY, Event, named_errors, pinned
from offload.device.kernels import digest, update
from offload.device.kernels.forms import Form
from offload.device.kernels.update import DeviceRun

_cuda: Any = torch.cuda  # torch.cuda has only partial types


class Compute:
    """Runs work on one device, in the order in which it is queued. Safe for several threads.

    The kernels of digests are compiled when it is made.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream = _cuda.Stream(device, priority=PRIORITY)
        self._lock = threading.Lock()
        self._workspace = torch.empty(0, dtype=torch.uint8, device=device)
        # CuPy's guard makes the device current again that was current before. That would be GPU 0
        # in a thread that has chosen none, and its context there would take memory. Torch's guard
        # leaves GPU 0 alone unless this process uses it.
        with torch.cuda.device(device):
            digest.kernels(device.index or 0)

    def view(self, buffer: Buffer) -> torch.Tensor:
        """Return a backend's device memory as a tensor of bytes, which keeps the buffer alive.

        Raises:
            ValueError: The buffer is not on this device.
        """
        tensor = torch.as_tensor(buffer, device=self.device)
        if tensor.data_ptr() != buffer.address:  # torch has copied it from another device
            raise ValueError(
                f"the backend allocates memory on another device than {self.device}, which holds "
                "the parameters: construct it with KvikioBackend(device=...), or with that device "
                "as the current one"
            )
        return tensor

    def trim(self) -> None:
        """Free the device memory that torch caches and nothing uses."""
        with torch.cuda.device(self.device):
            torch.cuda.empty_cache()

    @contextmanager
    def queue(self, after: Iterable[Event]) -> Iterator[None]:
        """Queue the block's work for this device on this object's stream, after the given points.

        The other methods except `wait`, and torch's operations on tensors of the device, must be
        called within such a block. Other threads that want to queue work wait until the block ends.
        """
        with (
            self._lock,
            named_errors(self.device, "update state"),
            torch.cuda.device(self.device),
            torch.cuda.stream(self._stream),
        ):
            for event in after:
                self._stream.wait_event(event)
            yield

    def empty(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised memory of the device, shape (num_elements,)."""
        return torch.empty(num_elements, dtype=dtype, device=self.device)

    def prepare(self, form: Form) -> None:
        """Compile a variant of the update kernel, unless it has been compiled already."""
        with torch.cuda.device(self.device):  # as in the constructor
            update.kernel(form, self.device.index or 0)

    def update(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        group: Mapping[str, Any],
        run: DeviceRun,
        *,
        step: int,
        factors: Sequence[float],
    ) -> None:
        """Queue `kernels.update.update_run`; the arguments are the same."""
        update.update_run(
            optimizer_class,
            group,
            run,
            stream=self._stream.cuda_stream,
            step=step,
            factors=factors,
        )

    def leaf_digests(self, data: torch.Tensor) -> torch.Tensor:
        """Queue the digests of a tensor's leaves; returns host memory, int64, for the results."""
        needed = digest.workspace_bytes(data.nbytes)
        if self._workspace.nbytes < needed:
            self._workspace = self.empty(needed, torch.uint8)
        found = self.empty(digest.num_leaves(data.nbytes), torch.int64)
        digest.leaf_digests(data, self._workspace, found, stream=self._stream.cuda_stream)
        return self.fetch(found)

    def fetch(self, source: torch.Tensor) -> torch.Tensor:
        """Queue a copy of a tensor to the host; returns the host memory."""
        out = pinned(source.shape, source.dtype, self.device)
        return out.copy_(source, non_blocking=True)

    def send(self, source: torch.Tensor, into: torch.Tensor) -> None:
        """Queue a copy of a host tensor, which must not change before that work has ended."""
        into.copy_(source, non_blocking=True)

    def mark(self) -> torch.cuda.Event:
        """Return the point at the end of the work that is queued so far."""
        event: torch.cuda.Event = _cuda.Event(blocking=True)  # a waiting thread uses no core
        event.record(self._stream)
        return event

    def wait(self, event: torch.cuda.Event) -> None:
        """Block the calling thread, without the GIL, until a point is reached."""
        with named_errors(self.device, "wait for updates of state"):
            event.synchronize()


COMPUTES: dict[str, Callable[[torch.device], Compute]] = {"cuda": Compute}
"""Constructors of `Compute`, by type of device."""

_made: dict[torch.device, Compute] = {}
_making = threading.Lock()


def compute_on(device: torch.device) -> Compute:
    """Return the `Compute` of a device: always the same object, so that its stream is made once."""
    with _making:
        if device not in _made:
            _made[device] = COMPUTES[device.type](device)
        return _made[device]
