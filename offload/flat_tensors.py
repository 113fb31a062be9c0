"""Flat views of tensors that may have none."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch


class FlatTensors:
    """Flat views of tensors, through a contiguous copy where a tensor has no flat view.

    A copy lives until all its elements have been finished, and is then written back if it may have
    been changed. Safe for several threads that ask for different elements.
    """

    def __init__(self, tensors: Sequence[torch.Tensor | None], *, writable: bool) -> None:
        self._tensors = tensors
        self._writable = writable
        self._flat: dict[int, torch.Tensor] = {}
        self._left: dict[int, int] = {}
        """Elements of each copy that have not been finished."""
        self._lock = threading.Lock()

    def view(self, index: int, start: int, stop: int) -> torch.Tensor:
        """Return elements `start` to `stop` of a tensor, in row-major order."""
        flat = self._flat.get(index)
        if flat is None:
            with self._lock:
                flat = self._flat.get(index)
                if flat is None:
                    flat = self._flat[index] = self._make(index)
        return flat[start:stop]

    def finish(self, index: int, num_elements: int) -> None:
        """Say that so many more elements are done; writes a copy back after the last ones."""
        if index not in self._left:
            return
        with self._lock:
            self._left[index] -= num_elements
            if self._left[index]:
                return
            del self._left[index]
            flat, tensor = self._flat.pop(index), self._tensors[index]
        if self._writable and tensor is not None:
            tensor.detach().copy_(flat.view(tensor.shape))

    def _make(self, index: int) -> torch.Tensor:
        tensor = self._tensors[index]
        if tensor is None:
            raise RuntimeError(f"tensor {index} is asked for, but there is none")
        flat = tensor.detach().reshape(-1)  # a view where one exists, a copy elsewhere
        if flat.data_ptr() != tensor.data_ptr():
            self._left[index] = flat.numel()
        return flat
