"""Reader of `torch.save` files that leaves tensors on storage.

torch's restricted loader (``weights_only=True``) reads the structure of a file onto the device
``meta``, and says where the data of each tensor lies. This module checks that each tensor lies in a
record of the archive which is stored as it is, because the data is read from there later.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gds import Backend, File
from offload.errors import CheckpointError
from offload.exchange.destination import torch_writing
from offload.exchange.stored_tensor import StoredTensor, require_file
from offload.format._manifest_fields import without_numpy

DTYPES: Final[Mapping[str, torch.dtype]] = {
    name: getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "complex64", "complex128", "bool"),
        *("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    )
}
"""Dtypes of the tensors that are read, by torch's names."""

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_NUMBERS = ("b1", "f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")
_SCALAR: Callable[..., Any] = np.float64(0).__reduce__()[0]  # type: ignore[assignment]
_NUMPY: Final[list[Callable[..., Any] | tuple[Callable[..., Any], str]]] = [
    (_SCALAR, "numpy.core.multiarray.scalar"),
    (_SCALAR, "numpy._core.multiarray.scalar"),
    np.dtype,
    *(type(np.dtype(code)) for code in _NUMBERS),
]
"""Names that numbers of NumPy need, which torch's loader does not know by itself."""

_LOCAL = struct.Struct("<4s5H3L2H")
"""Header before the data of a record in a ZIP file."""


class _UnreadableError(ValueError):
    """Something in a file is not read; the message says what."""


def read_structure(path: str, start: int = 0, stop: int | None = None) -> Any:
    """Load a file of `torch.save` with a `StoredTensor` for each tensor.

    Dictionaries of all kinds become plain ones.
    """
    size = require_file(path)
    stop = size if stop is None else stop
    if not 0 <= start <= stop <= size:
        raise CheckpointError(
            f"{path}: bytes {start} to {stop} were requested, but the file has {size}"
        )
    try:
        with open(path, "rb", buffering=0) as file:
            records = _records(io.BufferedReader(_Part(file, start, stop)))
            with torch.serialization.safe_globals(_NUMPY), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about protocols that are refused next
                loaded = torch.load(
                    io.BufferedReader(_Part(file, start, stop)),
                    map_location="meta",
                    weights_only=True,
                )
        return _Stored(path, start, records)(loaded)
    except _UnreadableError as error:
        raise _refusal(path, str(error)) from error
    except pickle.UnpicklingError as error:
        raise _refusal(path, _reason(str(error))) from error
    except Exception as error:  # a damaged file may end in any error of torch or Python
        text = str(error).partition("\n")[0]
        raise _refusal(path, f"{type(error).__name__}: {text:.200}") from error


def _reason(message: str) -> str:
    """Return why torch's loader refuses a pickle: the last line before what torch advises."""
    told = message.partition("Check the documentation")[0].strip().splitlines()
    last = told[-1] if told else "torch's restricted loader refuses its pickle"
    return last.rpartition("WeightsUnpickler error: ")[2].partition(". Please")[0]


def _refusal(path: str, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: cannot be read as a file of torch.save with tensors and builtins only "
        f"({reason:.300}). If you trust the file, load it with torch.load and save its "
        "state dicts again, with tensors and builtins only"
    )


class _Part(io.RawIOBase):
    """A range of an open file, as a file."""

    def __init__(self, file: io.FileIO, start: int, stop: int) -> None:
        self._file = file
        self._start = start
        self._nbytes = stop - start
        self._at = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to an offset in the range."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._nbytes}[whence]
        if base + offset < 0:
            raise ValueError("the position is before the beginning of the file")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read the next bytes of the range."""
        view = memoryview(buffer)[: max(self._nbytes - self._at, 0)]
        self._file.seek(self._start + self._at)
        num = self._file.readinto(view)
        self._at += num
        return num


def _records(file: io.BufferedReader) -> dict[int, int]:
    """Return the size of the content of each record, by the offset of its first byte."""
    if file.peek(2)[:2] != b"PK":
        raise _UnreadableError(
            "it is not in the zip format that torch.save writes since version 1.6"
        )
    with zipfile.ZipFile(file) as archive:
        listed = archive.infolist()
        order = [one for one in listed if one.filename.endswith("/byteorder")]
        if order and archive.read(order[0]).strip() != b"little":
            found = archive.read(order[0])[:20].decode(errors="replace")
            raise _UnreadableError(f"its byte order is {found!r}")
    if any(one.filename.endswith("/constants.pkl") for one in listed):
        raise _UnreadableError("it is a TorchScript archive, which holds a program")
    if len({one.filename for one in listed}) < len(listed):
        raise _UnreadableError("it has two records of one name")
    records = {}
    for one in listed:
        if one.compress_type != zipfile.ZIP_STORED or one.compress_size != one.file_size:
            raise _UnreadableError(
                f"its record {one.filename:.80} is compressed, which torch.save never does"
            )
        file.seek(one.header_offset)
        local = _LOCAL.unpack(file.read(_LOCAL.size))
        records[one.header_offset + _LOCAL.size + local[9] + local[10]] = one.file_size
    return records


class _Stored:
    """Replaces the tensors of a structure by their places in a file, within its records."""

    def __init__(self, path: str, start: int, records: Mapping[int, int]) -> None:
        self._path = path
        self._start = start
        self._records = records

    def __call__(self, value: Any) -> Any:
        """Return the structure with a `StoredTensor` for each tensor."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, dict):
            return {key: self(item) for key, item in value.items()}
        if type(value) is list:
            return [self(item) for item in value]
        if type(value) is tuple:
            return tuple(self(item) for item in value)
        if isinstance(value, torch.Size):
            return tuple(value)
        return without_numpy(value)

    def _tensor(self, tensor: torch.Tensor) -> StoredTensor:
        if type(tensor) not in _PLAIN or tensor.layout != torch.strided or tensor.is_quantized:
            what = tensor.layout if tensor.layout != torch.strided else type(tensor).__name__
            raise _UnreadableError(f"a tensor that is {what}, which is not read")
        size, strides, itemsize = tuple(tensor.shape), tensor.stride(), tensor.dtype.itemsize
        extent = 1
        for stride, num in sorted((s, n) for s, n in zip(strides, size, strict=True) if n > 1):
            if stride < extent:
                raise _UnreadableError(
                    f"a tensor of shape {size!s:.80} has elements that share memory: save it after "
                    ".contiguous()"
                )
            extent += (num - 1) * stride
        offset = tensor.untyped_storage()._checkpoint_offset
        begin = int(tensor.storage_offset()) * itemsize
        empty = not math.prod(size)
        if offset is None and not empty:
            raise _UnreadableError("a tensor without data")
        offset = offset or 0
        if not empty and begin + extent * itemsize > self._records.get(offset, 0):
            raise _UnreadableError(f"a tensor of shape {size!s:.80} does not lie within its record")
        kept = None if empty or tensor.is_contiguous() else tuple(strides)
        return StoredTensor(self._path, self._start + offset + begin, size, tensor.dtype, kept)


@dataclass(frozen=True, slots=True, eq=False)
class Placeholder:
    """A contiguous tensor of a file, whose data is written later.

    If a structure contains the same object twice, the two are tied tensors.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


def write_structure(backend: Backend, path: str, value: Any) -> tuple[File, dict[Placeholder, int]]:
    """Write a file of a structure; return it open, with the place of each placeholder's data.

    torch itself writes the file, with room for the data. So the file does not hold its tensors in
    memory: the data of placeholders is written later, and that of other tensors at once.
    """
    placeholders: dict[Placeholder, torch.Tensor] = {}
    small: list[tuple[Placeholder, torch.Tensor]] = []

    def emptied(tensor: torch.Tensor) -> Placeholder:
        """Return a placeholder for a tensor, and note the tensor's data for later."""
        small.append(
            (Placeholder(tuple(tensor.shape), tensor.dtype), tensor.detach().cpu().contiguous())
        )
        return small[-1][0]

    def fake(placeholder: Placeholder) -> torch.Tensor:
        """Return a fake tensor for a placeholder, the same one at each call."""
        if placeholder not in placeholders:
            placeholders[placeholder] = torch.empty(
                placeholder.shape, dtype=placeholder.dtype, device="cpu"
            )
        return placeholders[placeholder]

    value = _replaced(value, torch.Tensor, emptied)  # real tensors cannot be used in FakeTensorMode
    with FakeTensorMode():
        imitation = _replaced(value, Placeholder, fake)
        with torch.serialization.skip_data(materialize_fake_tensors=True), torch_writing(path):
            torch.save(imitation, path)
    offsets: dict[Placeholder, int] = {}
    by_tensor = {id(tensor): placeholder for placeholder, tensor in placeholders.items()}
    stored = _leaves(read_structure(path), StoredTensor)
    for mine, theirs in zip(_leaves(imitation, torch.Tensor), stored, strict=True):
        offsets[by_tensor[id(mine)]] = theirs.offset

    file = backend.open(path, writable=True)
    for placeholder, tensor in small:
        write_tensor(file, offsets[placeholder], tensor)
    return file, offsets


def write_tensor(file: File, offset: int, tensor: torch.Tensor) -> None:
    """Write the data of a contiguous tensor through the page cache."""
    if tensor.numel():
        file.write_bytes(tensor.reshape(-1).view(torch.uint8).numpy().tobytes(), offset)


def _replaced(value: Any, kind: type, replace: Callable[[Any], Any]) -> Any:
    """Return a copy of a nested structure, with all leaves of a type replaced.

    Dictionaries of any kind become plain ones.
    """
    if isinstance(value, kind):
        return replace(value)
    if isinstance(value, Mapping):
        return {key: _replaced(item, kind, replace) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)([_replaced(item, kind, replace) for item in value])
    return value


def _leaves(value: Any, kind: type) -> Iterator[Any]:
    """Yield the leaves of a type in a nested structure, in order."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item, kind)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item, kind)
