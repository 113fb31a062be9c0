"""Bytes of live tensors, wherever they are: the memory itself, or copies of a device's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from offload.near.chunks import Part

Memory = Callable[[int], torch.Tensor | None]
"""Function that returns the tensor with a number; None if there is none at present."""


def read(parts: Sequence[Part], memory: Memory) -> list[memoryview]:
    """Return the bytes of parts of tensors; copies, if the memory cannot be sent as it is.

    Raises:
        LookupError: There is no tensor with a number.
    """
    found = (_part(part, memory).cpu().contiguous() for part in parts)
    return [part.view(torch.uint8).numpy().data for part in found]


class Received:
    """Memory for bytes that are about to arrive for parts of tensors.

    Args:
        parts: Parts, in the order of the bytes.
        memory: Function that returns the tensors.

    Raises:
        LookupError: There is no tensor with a number.
    """

    def __init__(self, parts: Sequence[Part], memory: Memory) -> None:
        self._copies: list[tuple[torch.Tensor, slice, torch.Tensor]] = []
        self.views: list[memoryview] = []
        """Memory to fill."""
        for part in parts:
            tensor, found = _tensor(part[0], memory), _part(part, memory)
            if found.device.type != "cpu" or not tensor.is_contiguous():
                copy = torch.empty(found.shape, dtype=found.dtype, device="cpu")
                self._copies.append((tensor, _range(part, tensor), copy))
                found = copy
            self.views.append(found.view(torch.uint8).numpy().data)

    def store(self) -> None:
        """Bring what has arrived into the tensors."""
        for tensor, elements, copy in self._copies:
            flat = tensor.reshape(-1)  # a copy, if the tensor is not contiguous
            flat[elements] = copy.to(tensor.device)
            if not tensor.is_contiguous():
                tensor.copy_(flat.view(tensor.shape))


def _tensor(number: int, memory: Memory) -> torch.Tensor:
    found = memory(number)
    if found is None:
        raise LookupError(f"tensor {number} is missing")
    with torch._C.DisableTorchFunctionSubclass():
        return found.detach()


def _part(part: Part, memory: Memory) -> torch.Tensor:
    """Return the elements of a part, in memory of their own if the tensor is not contiguous."""
    tensor = _tensor(part[0], memory)
    return tensor.reshape(-1)[_range(part, tensor)]


def _range(part: Part, tensor: torch.Tensor) -> slice:
    _, start, stop = part
    size = tensor.element_size()
    return slice(start // size, stop // size)
