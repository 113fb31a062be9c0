"""Reader of `torch.save` files that leaves tensors on storage and does not use torch's loader.

The reader takes the structure of a file from its records and its pickle. It never runs code from
the file, and it takes memory in proportion to the length of the pickle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, Final, NoReturn

import numpy as np
import torch

from offload.errors import CheckpointError
from offload.exchange.foreign_paths import require_file
from offload.exchange.pickle_reading import (
    MAX_PICKLE_BYTES,
    PickleError,
    Record,
    StandIn,
    check_key,
    read_pickle,
)
from offload.exchange.stored_tensor import StoredTensor
from offload.exchange.torch_zip import TorchZip
from offload.format._manifest_fields import without_numpy

_MAX_DIMS = 64
_MAX_ELEMENTS = (1 << 63) - 1
_MAX_LABEL_BYTES = 64

DTYPES: Final[Mapping[str, torch.dtype]] = {
    name: getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "complex64", "complex128", "bool"),
        *("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    )
}
"""Dtypes of the tensors that are read, by torch's names."""

_STORAGES: Final[Mapping[str, torch.dtype]] = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}

_NUMBERS: Final = ("b1", "f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")
"""NumPy's codes of the dtypes of its numbers that are read."""

_NOT_READ: Final = {
    "_rebuild_sparse_tensor": "a sparse tensor",
    "_rebuild_sparse_csr_tensor": "a sparse tensor",
    "_rebuild_nested_tensor": "a nested tensor",
    "_rebuild_qtensor": "a quantized tensor",
    "_rebuild_meta_tensor_no_storage": "a tensor without data",
    "_rebuild_wrapper_subclass": "a tensor of a class of its own",
    "_rebuild_device_tensor_from_numpy": "a tensor of a device that torch saves through numpy",
    "_rebuild_device_tensor_from_cpu_tensor": "a tensor of a device that torch saves by value",
}


@dataclass(frozen=True, slots=True)
class _StorageType:
    """Type of a storage, as a pickle of torch names it."""

    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Storage:
    """A storage of tensors, by its place in the file."""

    dtype: torch.dtype
    begin: int
    """Offset of the first byte in the file."""

    nbytes: int


def read_structure(path: str, start: int = 0, stop: int | None = None) -> Any:
    """Load a file of `torch.save` with a `StoredTensor` for each tensor.

    Dictionaries of all kinds become plain ones.
    """
    size = require_file(path)
    with open(path, "rb") as file:
        stop = size if stop is None else stop
        if not 0 <= start <= stop <= size:
            raise CheckpointError(
                f"{path}: bytes {start} to {stop} were requested, but the file has {size}"
            )
        try:
            return _read(file, path, start, stop)
        except (CheckpointError, PickleError) as error:
            reason = str(error).removeprefix(f"{path}: ")
            raise CheckpointError(
                f"{path}: cannot be read as a file of torch.save with tensors and builtins only "
                f"({reason}). If you trust the file, load it with torch.load and save its "
                "state dicts again, with tensors and builtins only"
            ) from error


def _read(file: BinaryIO, path: str, start: int, stop: int) -> Any:
    file.seek(start)
    if file.read(min(2, stop - start)) != b"PK":
        raise PickleError("it is not in the zip format that torch.save writes since version 1.6")
    archive = TorchZip(file, path, start, stop)
    order = archive.read("byteorder", _MAX_LABEL_BYTES).strip()
    if order not in (b"", b"little"):
        raise PickleError(f"its byte order is {order.decode(errors='replace')!r}")
    data = archive.read("data.pkl", MAX_PICKLE_BYTES)
    return read_pickle(data, _names(path), _Storages(archive))


class _Storages:
    """Function from persistent ids to storages, whose data is found in an archive."""

    def __init__(self, archive: TorchZip) -> None:
        self._archive = archive
        self._places: dict[str, tuple[int, int]] = {}

    def __call__(self, pid: Any) -> _Storage:
        """Return the storage for a persistent id."""
        if type(pid) is not tuple or len(pid) != 5 or pid[0] != "storage":
            raise PickleError("a persistent id does not name a storage")
        _, kind, key, _, num = pid
        if not isinstance(kind, _StorageType) or not isinstance(key, str) or type(num) is not int:
            raise PickleError("a persistent id does not name a storage")
        if key not in self._places:
            self._places[key] = self._archive.locate(f"data/{key}")
        begin, nbytes = self._places[key]
        if not 0 <= num * kind.dtype.itemsize <= nbytes:
            raise PickleError(f"storage {key:.40} has {nbytes} bytes for {num} elements")
        return _Storage(kind.dtype, begin, num * kind.dtype.itemsize)


def _names(path: str) -> dict[tuple[str, str], Any]:
    """Return the table of all names that a pickle of torch may use, for a file at a path."""
    tensor, typed = partial(_tensor, path), partial(_typed_tensor, path)
    rebuild: dict[str, Callable[..., Any]] = {
        "_rebuild_tensor": tensor,
        "_rebuild_tensor_v2": tensor,
        "_rebuild_tensor_v3": typed,
        "_rebuild_parameter": _parameter,
        "_rebuild_parameter_with_state": _parameter,
        **{name: partial(_not_read, what) for name, what in _NOT_READ.items()},
    }
    names: dict[tuple[str, str], Any] = {
        **{("torch._utils", name): StandIn(name, call) for name, call in rebuild.items()},
        **{("torch", name): dtype for name, dtype in DTYPES.items()},
        **{("torch", name): _StorageType(dtype) for name, dtype in _STORAGES.items()},
        ("torch.storage", "UntypedStorage"): _StorageType(torch.uint8),
        ("torch._tensor", "_rebuild_from_type_v2"): StandIn("_rebuild_from_type_v2", _of_type),
        ("torch", "Tensor"): StandIn("torch.Tensor"),
        ("torch.nn.parameter", "Parameter"): StandIn("torch.nn.Parameter"),
        ("torch.nn.parameter", "Buffer"): StandIn("torch.nn.Buffer"),
        ("torch", "Size"): StandIn("torch.Size", tuple, copies=True),
        ("torch", "device"): StandIn("torch.device", _device),
        ("torch.serialization", "_get_layout"): StandIn("layout", str),
        ("collections", "OrderedDict"): StandIn("OrderedDict", _dict, copies=True),
        ("collections", "Counter"): StandIn("Counter", _dict, copies=True),
        ("numpy", "dtype"): StandIn("numpy.dtype", _numpy_dtype),
        ("numpy._core.multiarray", "scalar"): StandIn("numpy.scalar", _numpy_number),
        ("numpy.core.multiarray", "scalar"): StandIn("numpy.scalar", _numpy_number),
        ("_codecs", "encode"): StandIn("encode", _encoded, copies=True),
    }
    for module in ("builtins", "__builtin__"):
        # Only empty bytes are pickled by this name.
        names[module, "bytes"] = StandIn("bytes", lambda: b"")
        names[module, "set"] = StandIn("set", _set, copies=True)
        names[module, "complex"] = StandIn("complex", _complex)
        names[module, "bytearray"] = StandIn("bytearray", _bytearray, copies=True)
    return names


def _tensor(
    path: str,
    storage: Any,
    offset: Any,
    size: Any,
    strides: Any,
    requires_grad: Any = False,  # noqa: ARG001  (as torch calls it)
    hooks: Any = None,  # noqa: ARG001
    metadata: Any = None,  # noqa: ARG001
) -> StoredTensor:
    if not isinstance(storage, _Storage):
        raise PickleError("a tensor has no storage")
    return _checked(path, storage, offset, size, strides, storage.dtype)


def _typed_tensor(
    path: str,
    storage: Any,
    offset: Any,
    size: Any,
    strides: Any,
    requires_grad: Any,  # noqa: ARG001  (as torch calls it)
    hooks: Any,  # noqa: ARG001
    dtype: Any,
    metadata: Any = None,  # noqa: ARG001
) -> StoredTensor:
    if not isinstance(storage, _Storage) or not isinstance(dtype, torch.dtype):
        raise PickleError("a tensor has no storage, or no dtype")
    return _checked(path, storage, offset, size, strides, dtype)


def _checked(
    path: str, storage: _Storage, offset: Any, size: Any, strides: Any, dtype: torch.dtype
) -> StoredTensor:
    """Return a `StoredTensor`, after checking that it lies within its storage."""
    if (
        type(size) is not tuple
        or type(strides) is not tuple
        or len(size) != len(strides)
        or len(size) > _MAX_DIMS
        or any(type(n) is not int or n < 0 for n in (offset, *size, *strides))
    ):
        raise PickleError("a tensor has no shape")
    if math.prod(max(n, 1) for n in size) > _MAX_ELEMENTS:
        raise PickleError(f"a tensor of shape {size!s:.80} has too many elements")
    extent = 1
    for stride, num in sorted((s, n) for s, n in zip(strides, size, strict=True) if n > 1):
        if stride < extent:
            raise PickleError(
                f"a tensor of shape {size!s:.80} has elements that share memory: save it after "
                ".contiguous()"
            )
        extent += (num - 1) * stride
    begin = offset * dtype.itemsize
    if math.prod(size) and begin + extent * dtype.itemsize > storage.nbytes:
        raise PickleError(
            f"a tensor of shape {size!s:.80} does not lie within its storage of {storage.nbytes} "
            "bytes"
        )
    dense, expected = True, 1
    for num, stride in zip(reversed(size), reversed(strides), strict=True):
        dense = dense and (num == 1 or stride == expected)
        expected *= max(num, 1)
    kept = None if dense or not math.prod(size) else strides
    return StoredTensor(path, storage.begin + begin, size, dtype, kept)


def _parameter(data: Any, *_: Any) -> StoredTensor:
    if not isinstance(data, StoredTensor):
        raise PickleError("a parameter is not a tensor")
    return data


def _of_type(function: Any, kind: Any, arguments: Any, _: Any) -> Any:
    if not isinstance(function, StandIn) or function.call is None or type(arguments) is not tuple:
        raise PickleError("a tensor is built by an object that is not a function")
    if not isinstance(kind, StandIn):
        raise PickleError("a tensor of a class of its own, which is not read")
    return function.call(*arguments)


def _not_read(what: str, *_: Any) -> NoReturn:
    raise PickleError(f"{what}, which is not read")


def _dict(items: Any = ()) -> dict[Any, Any]:
    made = {}
    for key, value in items.items() if isinstance(items, dict) else items:
        check_key(key)
        made[key] = value
    return made


def _set(items: Any = ()) -> set[Any]:
    for item in items:
        check_key(item)
    return set(items)


def _encoded(text: Any, encoding: Any) -> bytes:
    if not isinstance(text, str) or encoding != "latin1":
        raise PickleError("bytes are not encoded as torch encodes them")
    return text.encode("latin1")


def _numpy_dtype(code: Any, *_: Any) -> Record:
    if code not in _NUMBERS:
        raise PickleError(f"NumPy's dtype {code!r:.40}, which is not read")
    return Record(code)


def _numpy_number(dtype: Any, data: Any) -> Any:
    state = dtype.fields.get("state", ()) if isinstance(dtype, Record) else ()
    if type(state) is not tuple or state[1:2] not in [("<",), ("|",)] or type(data) is not bytes:
        raise PickleError("a number of NumPy that is not in little-endian bytes")
    return without_numpy(np.frombuffer(data, f"<{dtype.kind}", count=1)[0])


def _complex(real: Any, imaginary: Any) -> complex:
    if type(real) is not float or type(imaginary) is not float:
        raise PickleError("a complex number is not two floats")
    return complex(real, imaginary)


def _bytearray(data: Any = b"") -> bytearray:
    if not isinstance(data, bytes):
        raise PickleError("a bytearray is not made of bytes")
    return bytearray(data)


def _device(*arguments: Any) -> str:
    """Return a device as text, since no tensor is moved to it."""
    return ":".join(str(part)[:20] for part in arguments if isinstance(part, str | int))
