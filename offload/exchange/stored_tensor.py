"""A tensor in a file of another program, read range by range."""

from __future__ import annotations

import json
import math
import mmap
import os
import stat
from typing import Any

import torch

from offload.errors import CheckpointError


def scratch_tensor(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a flat tensor in a memory mapping of its own, which is unmapped once it is unused.

    Memory from the heap might not return to the system, if small objects that live longer were
    allocated behind it.
    """
    return torch.frombuffer(mmap.mmap(-1, num_elements * dtype.itemsize), dtype=dtype)


class StoredTensor:
    """A tensor in a file, read range by range; implements `TensorSource`.

    Args:
        path: Path of the file.
        offset: Offset of the first element in the file, in bytes.
        shape: Elements per dimension.
        dtype: Dtype of the elements.
        strides: Strides in elements; None for a contiguous tensor.
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
    def tie_key(self) -> tuple[Any, ...] | None:
        """Key that is equal for tied tensors; None for an empty tensor."""
        return (self._path, self.offset, self.shape, self.dtype) if math.prod(self.shape) else None

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return elements `start` to `stop` in row-major order, flat, in host memory.

        A tensor that is not contiguous is read whole.

        Raises:
            CheckpointError: The file is too short.
        """
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


MAX_JSON_BYTES = 32 << 20
"""Largest JSON file that is read (an index of weights, or the Trainer's state), in bytes. Its
parsed objects take up to 25 times as much memory."""


def require_file(path: str) -> int:
    """Return the size of a regular file, in bytes. Symbolic links are followed.

    Anything else is refused before it is opened: opening a pipe could block, and reading a device
    might never end.
    """
    try:
        found = os.stat(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{path}: cannot be opened ({reason})") from error
    if not stat.S_ISREG(found.st_mode):
        kind = "a directory" if stat.S_ISDIR(found.st_mode) else "a pipe, a socket or a device"
        raise CheckpointError(f"{path}: {kind}, expected a file")
    return found.st_size


def read_json(path: str) -> Any:
    """Return the value of a JSON file of another program. NaN is accepted."""
    size = require_file(path)
    if size > MAX_JSON_BYTES:
        raise CheckpointError(f"{path}: {size} bytes, at most {MAX_JSON_BYTES} are read")
    with open(path, "rb") as file:
        data = file.read(size)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise CheckpointError(f"{path}: not JSON ({reason})") from error
