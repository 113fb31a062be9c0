"""Files of `torch.save`, written and read without holding their tensors.

torch itself writes the file, with room for the data (`torch.serialization.skip_data`), and says
where each tensor's data is (loading under `FakeTensorMode`, always with ``weights_only=True``); the
bytes are then moved by us.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import pickle
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gds import Backend, File
from offload.errors import CheckpointError


@dataclass(frozen=True, slots=True, eq=False)
class Room:
    """A contiguous tensor of a file, whose data is written later. The same object is tied."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def write_structure(path: str, value: Any) -> Callable[[Backend], tuple[File, dict[Room, int]]]:
    """Write a file with everything but the data of its `Room`s.

    Args:
        path: Must not exist.
        value: Builtins, tensors and `Room`s, nested.

    Returns:
        What opens the file for writing, and says at which byte each room begins.
    """
    rooms: dict[Room, torch.Tensor] = {}
    small: list[tuple[Room, torch.Tensor]] = []

    def emptied(tensor: torch.Tensor) -> Room:
        small.append((Room(tuple(tensor.shape), tensor.dtype), tensor.detach().cpu().contiguous()))
        return small[-1][0]

    def fake(room: Room) -> torch.Tensor:
        if room not in rooms:
            rooms[room] = torch.empty(room.shape, dtype=room.dtype, device="cpu")
        return rooms[room]

    value = _replaced(value, torch.Tensor, emptied)  # before fake tensors become the only ones
    with FakeTensorMode():
        imitation = _replaced(value, Room, fake)
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(imitation, path)
    offsets: dict[Room, int] = {}
    by_tensor = {id(tensor): room for room, tensor in rooms.items()}
    for mine, theirs in zip(_tensors(imitation), _tensors(_load_fake(path)), strict=True):
        offsets[by_tensor[id(mine)]] = _offset(theirs)

    def opened(backend: Backend) -> tuple[File, dict[Room, int]]:
        file = backend.open(path, writable=True)
        for room, tensor in small:
            write_tensor(file, offsets[room], tensor)
        return file, offsets

    return opened


def write_tensor(file: File, offset: int, tensor: torch.Tensor) -> None:
    """Write the data of a contiguous tensor through the page cache."""
    if tensor.numel():
        file.write_bytes(tensor.reshape(-1).view(torch.uint8).numpy().tobytes(), offset)


def scratch_tensor(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Return flat memory of its own mapping, which goes back to the system when it is let go of.

    The heap would keep it where small objects that stay are made in between.
    """
    return torch.frombuffer(mmap.mmap(-1, num_elements * dtype.itemsize), dtype=dtype)


class StoredTensor:
    """A tensor of a file that is read range by range; a `TensorSource`.

    Args:
        path: The file.
        offset: Byte at which its storage begins.
        tensor: A fake one, with its shape, strides and dtype.
    """

    def __init__(self, path: str, offset: int, tensor: torch.Tensor) -> None:
        self._path = path
        self._itemsize = tensor.dtype.itemsize
        self._offset = offset + int(tensor.storage_offset()) * self._itemsize
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype
        self.place = (path, self._offset, self.shape, self.dtype) if tensor.numel() else None
        """The same for tensors that are tied; None for an empty one."""
        self._strides = None if tensor.is_contiguous() else tensor.stride()

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
            file.seek(self._offset + start * self._itemsize)
            if file.readinto(data) != len(data):
                raise CheckpointError(
                    f"{self._path}: ends before byte {self._offset + stop * self._itemsize}"
                )
        return out


def read_structure(path: str, start: int = 0, stop: int | None = None) -> Any:
    """Load a file of `torch.save` with a `StoredTensor` for each tensor.

    Args:
        path: The file.
        start: First byte, where it is part of another file.
        stop: One past its last byte; None for the end.

    Raises:
        CheckpointError: It is no such file, or holds something else than tensors and builtins,
            which would have to be executed.
    """

    def stored(tensor: torch.Tensor) -> StoredTensor:
        return StoredTensor(path, start + _offset(tensor), tensor)

    return _replaced(_load_fake(path, start, stop), torch.Tensor, stored)


def _replaced(value: Any, kind: type, replace: Callable[[Any], Any]) -> Any:
    """Return a nested structure with other leaves; dictionaries of any kind become plain ones."""
    if isinstance(value, kind):
        return replace(value)
    if isinstance(value, Mapping):
        return {key: _replaced(item, kind, replace) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)([_replaced(item, kind, replace) for item in value])
    return value


_OF_DAMAGED_PICKLES = (
    pickle.UnpicklingError,
    struct.error,
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What torch's unpickler raises where bytes are missing or are others than were written."""


def _load_fake(path: str, start: int = 0, stop: int | None = None) -> Any:
    try:
        with FakeTensorMode(), contextlib.closing(open(path, "rb")) as file:
            part = file if stop is None else _FilePart(file, start, stop)
            return torch.load(part, weights_only=True)  # type: ignore[arg-type]
    except _OF_DAMAGED_PICKLES as error:
        raise CheckpointError(
            f"{path}: cannot be read as a file of torch.save with tensors and builtins only "
            f"({str(error).splitlines()[0] if str(error) else type(error).__name__}). Load it "
            "with torch.load where you trust it, and save the state dicts again"
        ) from error


class _FilePart(io.RawIOBase):
    """A range of a file, as a file."""

    def __init__(self, file: io.BufferedReader, start: int, stop: int) -> None:
        super().__init__()
        self._file = file
        self._start = start
        self._size = stop - start
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(base + offset, 0)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        num = max(min(len(view), self._size - self._at), 0)
        self._file.seek(self._start + self._at)
        num = self._file.readinto(view[:num])
        self._at += num
        return num


def _offset(tensor: torch.Tensor) -> int:
    """Return the byte of a file at which the storage of a fake tensor begins."""
    offset: int | None = tensor.untyped_storage()._checkpoint_offset
    if offset is None:
        raise CheckpointError("torch does not say where a tensor's data is in its file")
    return offset


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
