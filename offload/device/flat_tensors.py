"""Flat views of tensors, contiguous or not."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from offload.format.chunk_plan import Piece


class FlatTensors:
    """Flat views of tensors; a tensor that has no flat view is copied.

    A writable tensor is also copied if its flat view would not be contiguous. When all elements of
    a writable tensor are finished, its copy is written back; a tensor that is only read is then
    released. Safe for several threads that request different elements.

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

    def views(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """Return the elements of each piece, flat, in row-major order.

        Raises:
            RuntimeError: A tensor is missing or has been released.
        """
        found = []
        with self._lock:
            for piece in pieces:
                flat = self._flat.get(piece.parameter)
                if flat is None:
                    flat = self._flatten(piece.parameter)
                is_whole = piece.stop - piece.start == flat.numel()
                found.append(flat if is_whole else flat[piece.start : piece.stop])
        return found

    def _flatten(self, index: int) -> torch.Tensor:
        tensor = self._tensors[index]
        if tensor is None:
            raise RuntimeError(f"tensor {index} was requested, but this pass has no such tensor")
        # reshape returns a view if one exists, and a copy otherwise
        flat = tensor.detach().reshape(-1)
        if self._writable:
            flat = flat.contiguous()
        self._flat[index] = flat
        self._num_left[index] = flat.numel()
        return flat

    def tensor(self, index: int) -> torch.Tensor | None:
        """Return a tensor itself; None if it is missing or has been released."""
        return self._tensors[index]

    def replace(self, index: int, tensor: torch.Tensor) -> None:
        """Set a tensor that has not been viewed yet."""
        self._tensors[index] = tensor

    def release(self, index: int) -> None:
        """Drop a tensor that has not been viewed, and is not needed any more."""
        self._tensors[index] = None

    def finish(self, pieces: Sequence[Piece]) -> None:
        """Report that elements of pieces, which have been viewed, are not used any more."""
        ended = []
        with self._lock:
            for piece in pieces:
                index = piece.parameter
                self._num_left[index] -= piece.stop - piece.start
                if self._num_left[index]:
                    continue
                del self._num_left[index]
                flat, tensor = self._flat.pop(index), self._tensors[index]
                if not self._writable:
                    self._tensors[index] = None
                elif tensor is not None and not tensor.is_contiguous():
                    ended.append((tensor, flat))
        for tensor, flat in ended:
            tensor.detach().copy_(flat.view(tensor.shape))
