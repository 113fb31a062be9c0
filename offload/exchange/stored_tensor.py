"""Tensors in files of other programs, read range by range."""

from __future__ import annotations

import math
import mmap
from typing import Any

import torch

from offload.errors import CheckpointError


def scratch_tensor(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Return flat memory of its own mapping, which goes back to the system when it is let go of.

    The heap would keep it where small objects that stay are made in between.
    """
    return torch.frombuffer(mmap.mmap(-1, num_elements * dtype.itemsize), dtype=dtype)


class StoredTensor:
    """A tensor of a file that is read range by range; a `TensorSource`.

    Args:
        path: The file.
        offset: Byte at which its first element is.
        shape: Elements per dimension.
        dtype: Of the elements.
        strides: In elements; None where it is contiguous.
    """

    __slots__ = ("_itemsize", "_path", "_strides", "dtype", "offset", "shape")

    def __init__(
        self,
        path: str,
        offset: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        strides: tuple[int, ...] | None = None,
    ) -> None:
        self._path = path
        self._itemsize = dtype.itemsize
        self._strides = strides
        self.offset = offset
        self.shape = shape
        self.dtype = dtype

    @property
    def place(self) -> tuple[Any, ...] | None:
        """The same for tensors that are tied; None for an empty one."""
        return (self._path, self.offset, self.shape, self.dtype) if math.prod(self.shape) else None

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return elements in row-major order; reads all of a tensor that is not contiguous."""
        if start >= stop:
            return torch.empty(0, dtype=self.dtype, device="cpu")
        if self._strides is None:
            return self._read(start, stop)
        extent = 1 + sum((n - 1) * s for n, s in zip(self.shape, self._strides, strict=True))
        whole = self._read(0, extent).as_strided(self.shape, self._strides)
        return whole.reshape(-1)[start:stop]

    def _read(self, start: int, stop: int) -> torch.Tensor:
        out = scratch_tensor(stop - start, self.dtype)
        data = out.view(torch.uint8).numpy().data
        with open(self._path, "rb") as file:
            file.seek(self.offset + start * self._itemsize)
            if file.readinto(data) != len(data):
                raise CheckpointError(
                    f"{self._path}: ends before byte {self.offset + stop * self._itemsize}"
                )
        return out
