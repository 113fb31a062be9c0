"""Flat views of tensors, contiguous or not."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch


class FlatTensors:
    """Flat views of tensors; a tensor that has no flat view is copied.

    A writable tensor is also copied if its flat view would not be contiguous. When all elements of
    a tensor are finished, a copy of a writable tensor is written back, and a tensor that is only
    read is released. Safe for several threads that request different elements.

    Args:
        tensors: Parameters or gradients; None for a missing gradient.
        writable: Whether the tensors may be changed.
    """

    def __init__(self, tensors: Sequence[torch.Tensor | None], *, writable: bool) -> None:
        self._tensors = list(tensors)
        self._writable = writable
        self._flat: dict[int, torch.Tensor] = {}
        self._num_left: dict[int, int] = {}
        """Number of elements of each viewed tensor that have not been finished."""
        self._lock = threading.Lock()

    def view(self, index: int, start: int, stop: int) -> torch.Tensor:
        """Return elements `start` to `stop` of a tensor, in row-major order.

        Raises:
            RuntimeError: The tensor is missing or has been released.
        """
        flat = self._flat.get(index)
        if flat is None:
            with self._lock:
                flat = self._flat.get(index)
                if flat is None:
                    tensor = self._tensors[index]
                    if tensor is None:
                        raise RuntimeError(
                            f"tensor {index} was requested, but this pass has no such tensor"
                        )
                    # reshape returns a view if one exists, and a copy otherwise
                    flat = tensor.detach().reshape(-1)
                    if self._writable:
                        flat = flat.contiguous()
                    self._flat[index] = flat
                    self._num_left[index] = flat.numel()
        return flat[start:stop]

    def tensor(self, index: int) -> torch.Tensor | None:
        """Return a tensor itself; None if it is missing or has been released."""
        return self._tensors[index]

    def replace(self, index: int, tensor: torch.Tensor) -> None:
        """Set a tensor that has not been viewed yet."""
        self._tensors[index] = tensor

    def finish(self, index: int, num_elements: int) -> None:
        """Report that this many more elements of a viewed tensor are done."""
        with self._lock:
            self._num_left[index] -= num_elements
            if self._num_left[index]:
                return
            del self._num_left[index]
            flat, tensor = self._flat.pop(index), self._tensors[index]
            if not self._writable:
                self._tensors[index] = None
        if self._writable and tensor is not None and not tensor.is_contiguous():
            tensor.detach().copy_(flat.view(tensor.shape))
