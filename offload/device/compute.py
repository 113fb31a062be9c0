"""Computing on a device that holds state: a stream of its own, memory, kernels.

Nothing else in this package computes on a device. Work is queued on one stream, made once, after
the points in the training's streams that it depends on; whoever has queued it waits for its end
before memory of the frames, gradients or parameters is used for anything else. So neither stream
is ever synchronised as a whole, and the training's stream waits for nothing: what is launched on it
after `wait` has returned comes after the update.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from gds import Buffer
from offload.device.boundary import Event
from offload.device.kernels import digest, update
from offload.device.kernels.forms import DeviceBlock, DeviceScalars, Form

_cuda: Any = torch.cuda  # which is typed in part


class Compute(Protocol):
    """Runs work on one device, in the order in which it is queued. For several threads."""

    device: torch.device

    def view(self, buffer: Buffer) -> torch.Tensor:
        """Return device memory of a backend as a tensor of bytes, which keeps it alive."""
        ...

    def trim(self) -> None:
        """Give memory back to the device that torch keeps for later, but nobody uses."""
        ...

    def queue(self, after: Iterable[Event]) -> AbstractContextManager[None]:
        """Have the block's work on this device queued here, after these points.

        The other methods but `wait`, and torch's operations on tensors of the device, belong into
        such a block. Other threads wait until it has ended.
        """
        ...

    def empty(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory of the device, of any content."""
        ...

    def number(self, value: float) -> torch.Tensor:
        """Return a number as FP32, of one element, without copying it from the host."""
        ...

    def prepare(self, form: Form) -> None:
        """Compile a variant of the update, unless that has been done."""
        ...

    def update(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        group: Mapping[str, Any],
        block: DeviceBlock,
        *,
        step: int,
        seed: int,
        rounding_step: int,
        scalars: DeviceScalars,
    ) -> None:
        """Queue `kernels.update.update_block`."""
        ...

    def leaf_digests(self, data: torch.Tensor) -> torch.Tensor:
        """Queue the digests of a tensor's leaves; they are in the result, on the host, later."""
        ...

    def fetch(self, source: torch.Tensor) -> torch.Tensor:
        """Queue a copy of a tensor to the host; it is in the result later."""
        ...

    def send(self, source: torch.Tensor, into: torch.Tensor) -> None:
        """Queue a copy of a tensor of the host, which must not change before it is done."""
        ...

    def mark(self) -> Event:
        """Return the point that has been queued up to."""
        ...

    def wait(self, event: Event) -> None:
        """Let the calling thread wait for a point, in the kernel and without the GIL."""
        ...


class CudaCompute:
    """`Compute` on a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream = _cuda.Stream(device)
        self._lock = threading.Lock()
        self._workspace = torch.empty(0, dtype=torch.uint8, device=device)
        digest.compile_kernels(device.index or 0)

    def view(self, buffer: Buffer) -> torch.Tensor:
        """Make a tensor by ``__cuda_array_interface__``.

        Raises:
            ValueError: The buffer is not on this device.
        """
        tensor = torch.as_tensor(buffer, device=self.device)
        if tensor.data_ptr() != buffer.address:  # torch has made a copy
            raise ValueError(
                f"the backend allocates memory of another device than {self.device}, where the "
                "parameters are: make it with KvikioBackend(device=...), or with that device as "
                "the current one"
            )
        return tensor

    def trim(self) -> None:
        """Empty torch's pool."""
        with torch.cuda.device(self.device):
            torch.cuda.empty_cache()

    @contextmanager
    def queue(self, after: Iterable[Event]) -> Iterator[None]:
        """Make the stream the current one."""
        with self._lock, torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            for event in after:
                self._stream.wait_event(event)
            yield

    def empty(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Take memory from torch's pool for the stream."""
        return torch.empty(num_elements, dtype=dtype, device=self.device)

    def number(self, value: float) -> torch.Tensor:
        """Fill a tensor."""
        return torch.full((1,), value, dtype=torch.float32, device=self.device)

    def prepare(self, form: Form) -> None:
        """Compile it."""
        update.compile_form(form, self.device.index or 0)

    def update(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        group: Mapping[str, Any],
        block: DeviceBlock,
        *,
        step: int,
        seed: int,
        rounding_step: int,
        scalars: DeviceScalars,
    ) -> None:
        """Launch the kernel."""
        update.update_block(
            optimizer_class,
            group,
            block,
            stream=self._stream.cuda_stream,
            step=step,
            seed=seed,
            rounding_step=rounding_step,
            scalars=scalars,
        )

    def leaf_digests(self, data: torch.Tensor) -> torch.Tensor:
        """Launch the kernels, and a copy of what they find."""
        needed = digest.workspace_bytes(data.nbytes)
        if self._workspace.nbytes < needed:
            self._workspace = self.empty(needed, torch.uint8)
        found = self.empty(digest.num_leaves(data.nbytes), torch.int64)
        digest.leaf_digests(data, self._workspace, found, stream=self._stream.cuda_stream)
        return self.fetch(found)

    def fetch(self, source: torch.Tensor) -> torch.Tensor:
        """Copy to page-locked memory."""
        out = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
        return out.copy_(source, non_blocking=True)

    def send(self, source: torch.Tensor, into: torch.Tensor) -> None:
        """Copy from there."""
        into.copy_(source, non_blocking=True)

    def mark(self) -> torch.cuda.Event:
        """Record an event on the stream."""
        event: torch.cuda.Event = _cuda.Event(blocking=True)  # waiting does not keep a core busy
        event.record(self._stream)
        return event

    def wait(self, event: torch.cuda.Event) -> None:
        """Wait for an event."""
        event.synchronize()


COMPUTES: dict[str, Callable[[torch.device], Compute]] = {"cuda": CudaCompute}
"""What computes, by type of device."""

_made: dict[torch.device, Compute] = {}
_making = threading.Lock()


def compute_on(device: torch.device) -> Compute:
    """Return what computes on a device: always the same, so that its stream is made once."""
    with _making:
        if device not in _made:
            _made[device] = COMPUTES[device.type](device)
        return _made[device]
