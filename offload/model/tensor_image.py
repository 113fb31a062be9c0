"""Live tensors viewed as bytes that lie end to end, with copies of ranges of them."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import torch

from offload.device.boundary import (
    Copies,
    Event,
    Marks,
    boundary_of,
    is_on_device,
    marks_of,
)
from offload.device.filed import FiledTensor
from offload.device.staging import Traffic


class TensorImage:
    """Live tensors, viewed as bytes that lie end to end.

    Args:
        tensors: Live tensors in their order. The values of a tensor on a device are those that the
            work up to `marks` computes.
        marks: Points in the streams of the devices; None for the end of the work that is queued so
            far on the calling thread's current streams.
        traffic: Counter of the bytes that cross.
        names: Names of the tensors, for messages.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        marks: Marks | None = None,
        traffic: Traffic | None = None,
        *,
        names: Sequence[str],
    ) -> None:
        self._tensors = [t for t in tensors if t.numel()]
        self._names = [n for n, t in zip(names, tensors, strict=True) if t.numel()]
        ends = list(accumulate((t.numel() * t.element_size() for t in self._tensors), initial=0))
        self._starts, self._stops = ends[:-1], ends[1:]
        self._staged: dict[int, torch.Tensor] = {}
        self._marks = marks_of(self._tensors) if marks is None else marks
        self._traffic = traffic or Traffic()
        self.data_bytes = ends[-1]
        """Number of bytes of all tensors together."""

    def gather(
        self, start: int, stop: int, out: torch.Tensor, *, on_one_thread: bool = False
    ) -> None:
        """Copy a range of the bytes from the live tensors into `out`; complete on return.

        Args:
            start: First byte of the range.
            stop: One past the last byte.
            out: Host memory of as many bytes, dtype uint8.
            on_one_thread: Whether host memory is copied on the calling thread alone; see
                `copy_on_one_thread`.

        Raises:
            RuntimeError: The memory of a tensor was freed or moved meanwhile; names the tensor.
        """
        fetched: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        places: dict[int, int] = {}
        for index, first, last, at in self._overlaps(start, stop):
            if isinstance(self._tensors[index], FiledTensor):
                self.read_filed(index, first, out[at : at + last - first])
                continue
            places[index] = self._place(index)
            flat, into = self._flat(index), out[at : at + last - first]
            if is_on_device(flat):
                fetched.setdefault(flat.device, []).append((flat[first:last], into))
            elif on_one_thread:
                copy_on_one_thread(flat[first:last], into)
            else:
                into.copy_(flat[first:last])
            if last == flat.numel():
                self._staged.pop(index, None)
        if fetched:
            self._fetch(fetched)
        for index, place in places.items():
            if self._place(index) != place:
                raise self._moved(index)

    def read_filed(self, index: int, first: int, out: torch.Tensor) -> None:
        """Read bytes of a tensor that has no memory.

        Args:
            index: Index of the tensor.
            first: First of its bytes that is read.
            out: Memory for the bytes.

        Raises:
            NotImplementedError: The tensor is in no file.
        """
        raise NotImplementedError(f"{len(out)} bytes of {self._names[index]!r} are in no memory")

    def filed(self, start: int, stop: int) -> list[str]:
        """Return the names of all tensors with a byte in a range; none if any has memory."""
        found = [index for index, *_ in self._overlaps(start, stop)]
        if not all(isinstance(self._tensors[index], FiledTensor) for index in found):
            return []
        return [self._names[index] for index in found]

    def _fetch(self, copies: Mapping[torch.device, Copies]) -> None:
        """Copy from devices, and wait for the copies."""
        events = [
            (device, boundary_of(device).fetch(pairs, self._after(device)))
            for device, pairs in copies.items()
        ]
        for device, event in events:
            boundary_of(device).wait(event)
            self._traffic.fetched(sum(into.nbytes for _, into in copies[device]))

    def _after(self, device: torch.device) -> list[Event]:
        return [self._marks[device]] if device in self._marks else []

    def _overlaps(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        index = max(bisect_right(self._starts, start) - 1, 0)
        while index < len(self._starts) and self._starts[index] < stop:
            begin, end = self._starts[index], self._stops[index]
            first, last = max(start, begin), min(stop, end)
            if first < last:
                yield index, first - begin, last - begin, first - start
            index += 1

    def _place(self, index: int) -> int:
        """Return the address of a tensor, whose storage must still have all of its elements."""
        tensor = self._tensors[index]
        steps = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        last = tensor.storage_offset() + steps
        if tensor.untyped_storage().nbytes() < (last + 1) * tensor.itemsize:
            raise self._moved(index)
        return tensor.data_ptr()

    def _moved(self, index: int) -> RuntimeError:
        return RuntimeError(
            f"the memory of {self._names[index]!r} was freed or moved while it was being copied "
            "into the checkpoint. Call .result() on the handle before resizing storages or sharing "
            "memory"
        )

    def _flat(self, index: int) -> torch.Tensor:
        tensor = self._tensors[index].detach()
        # The memory of a conjugated or negated view holds other values than the view.
        if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
            return bytes_of(tensor)
        if index not in self._staged:
            if is_on_device(tensor):
                device = tensor.device
                flat = boundary_of(device).flatten(tensor, self._after(device))
            else:
                flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
            self._staged[index] = flat.view(torch.uint8)
        return self._staged[index]


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as bytes."""
    flat = tensor.reshape(-1)
    if flat.stride(0) != 1:  # one element of another tensor; it counts as contiguous
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


def copy_on_one_thread(source: torch.Tensor, into: torch.Tensor) -> None:
    """Copy host memory on the calling thread alone.

    Torch divides a large copy among its threads. If other work keeps the cores busy, waiting for
    those threads takes longer than the whole copy.
    """
    if type(source) is not torch.Tensor or type(into) is not torch.Tensor:
        into.copy_(source)  # a subclass need not have memory of its own
        return
    ctypes.memmove(into.data_ptr(), source.data_ptr(), source.numel())
    into[:0].copy_(source[:0])  # so that torch counts the change of a live tensor
