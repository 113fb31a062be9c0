"""Storage of the values of torch and numpy in a training state.

Each package is imported only when one of its values or tags occurs. Bytes are always stored
little-endian and in C order. Restored torch tensors are on the CPU, contiguous and without
``requires_grad``, and share their storage with no other tensor.
"""

from __future__ import annotations

import base64
import binascii
import ctypes
import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from offload.errors import TrainStateFormatError, TrainStateTypeError
from offload.format.header import DTYPE_BYTES
from offload.format.strict_json import short

if TYPE_CHECKING:
    import numpy as np
    import torch

Fields = dict[str, Any]
"""A tag and its fields, as JSON holds them. The tag itself is at `TAG_KEY`."""

TAG_KEY = "$"
"""The key that makes a JSON object a tag."""

LEAF_PACKAGES = frozenset({"torch", "numpy"})
"""Top-level packages whose types `leaf_tag` may know."""


Path = tuple["Path | None", str, object]
"""Position of a value: the parent's path, a pattern, and the key that fills the pattern. A path is
rendered only for a message: rendering calls the ``repr`` of keys, which costs time, and may warn or
fail."""

ROOT: Path = (None, "train_state", None)
"""Path of the whole state."""


def render(path: Path) -> str:
    """Return a path as Python would write it: ``train_state['scheduler']['gamma']``."""
    parts = []
    step: Path | None = path
    while step is not None:
        step, pattern, key = step
        parts.append(pattern.format(short(key)))
    return "".join(reversed(parts))


class StoredTensor(NamedTuple):
    """Dtype, shape and bytes of one stored tensor or array."""

    dtype: str
    """safetensors code of the elements, a key of `offload.format.header.DTYPE_BYTES`."""

    shape: tuple[int, ...]

    data: bytes
    """Elements in C order, little-endian."""


Store = Callable[[StoredTensor], str]
"""Function that takes a tensor and returns the name under which it is stored."""

Fetch = Callable[[object], StoredTensor]
"""Function that returns the tensor stored under a name, or raises `TrainStateFormatError` if there
is none."""

# For each dtype, by its name in torch and numpy: the safetensors code, and the number of values of
# that code in one element. safetensors has no code for complex32 and complex128, so their tensors
# get one more dimension of size 2.
_TORCH_CODES: Mapping[str, tuple[str, int]] = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "int16": ("I16", 1),
    "uint16": ("U16", 1),
    "int32": ("I32", 1),
    "uint32": ("U32", 1),
    "int64": ("I64", 1),
    "uint64": ("U64", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e4m3fnuz": ("F8_E4M3FNUZ", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e5m2fnuz": ("F8_E5M2FNUZ", 1),
    "float8_e8m0fnu": ("F8_E8M0", 1),
    "float16": ("F16", 1),
    "bfloat16": ("BF16", 1),
    "float32": ("F32", 1),
    "float64": ("F64", 1),
    "complex32": ("F16", 2),
    "complex64": ("C64", 1),
    "complex128": ("F64", 2),
}
_NUMPY_NAMES = frozenset(
    {
        "bool",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "float32",
        "float64",
        "complex64",
        "complex128",
    }
)
"""numpy's names of the dtypes that are supported. longdouble is missing: its layout differs between
platforms."""


def leaf_tag(value: object, path: Path, store: Store | None) -> Fields | None:
    """Return the tag of a value of torch or numpy; None if its type is not supported."""
    if type(value).__module__.partition(".")[0] == "torch":
        return _torch_tag(value, path, store)
    return _numpy_tag(value, path, store)


def _torch_tag(value: object, path: Path, store: Store | None) -> Fields | None:
    import torch

    kind = type(value)
    if kind is torch.Size:
        return {TAG_KEY: "torch.Size", "items": list(value)}  # type: ignore[call-overload]
    if kind is torch.dtype:
        return {TAG_KEY: "torch.dtype", "name": str(value).removeprefix("torch.")}
    if kind is torch.device:
        return {TAG_KEY: "torch.device", "name": str(value)}
    # Subclasses (Parameter, DTensor, FakeTensor) hold more than their values, so they are not
    # supported.
    if not isinstance(value, torch.Tensor) or kind is not torch.Tensor:
        return None
    name = str(value.dtype).removeprefix("torch.")
    if value.layout is not torch.strided or value.is_meta or name not in _TORCH_CODES:
        raise TrainStateTypeError(
            f"{render(path)}: cannot store a tensor of dtype {name}, layout {value.layout} "
            f"on device {value.device}; store a dense tensor of an ordinary dtype instead"
        )
    code, factor = _TORCH_CODES[name]
    # Conjugation and negation are lazy bits on the tensor, which the bytes alone would lose.
    flat = value.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    # The bytes do not go through numpy, which has no bfloat16. `flat` keeps the memory alive during
    # the copy.
    data = ctypes.string_at(flat.data_ptr(), flat.nbytes) if flat.nbytes else b""
    shape = (*value.shape, factor) if factor > 1 else tuple(value.shape)
    stored = _need(store, path)(StoredTensor(code, shape, data))
    return {TAG_KEY: "torch.Tensor", "tensor": stored, "dtype": name}


def _numpy_tag(value: object, path: Path, store: Store | None) -> Fields | None:
    import numpy as np

    kind = type(value)
    if kind is not np.ndarray and not isinstance(value, (np.number, np.bool_)):
        return None
    array = np.asarray(value)
    if array.dtype.name not in _NUMPY_NAMES:
        raise TrainStateTypeError(
            f"{render(path)}: cannot store a numpy value of dtype {array.dtype}; only booleans, "
            "integers, floats of 16 to 64 bits and complex numbers of 64 or 128 bits can be stored"
        )
    data = array.astype(array.dtype.newbyteorder("<")).tobytes()
    if kind is not np.ndarray:
        text = base64.b64encode(data).decode("ascii")
        return {TAG_KEY: "numpy.scalar", "dtype": array.dtype.name, "base64": text}
    code, factor = _TORCH_CODES[array.dtype.name]
    shape = (*array.shape, factor) if factor > 1 else array.shape
    stored = _need(store, path)(StoredTensor(code, shape, data))
    return {TAG_KEY: "numpy.ndarray", "tensor": stored, "dtype": array.dtype.str}


def _need(store: Store | None, path: Path) -> Store:
    if store is None:
        raise TrainStateTypeError(
            f"{render(path)}: a tensor or array cannot be a key or a member of a set. It is "
            "hashed by identity, and a restored one is another object; store it as a value instead"
        )
    return store


def _decode_size(fields: Fields, path: Path) -> torch.Size:
    """Return the `torch.Size` that the fields describe."""
    import torch

    items = fields["items"]
    if not isinstance(items, list) or any(
        type(n) is not int or not -(2**63) <= n < 2**63 for n in items
    ):
        raise TrainStateFormatError(f"{render(path)}: a torch.Size is not a list of integers")
    return torch.Size(items)


def _decode_dtype(fields: Fields, path: Path) -> torch.dtype:
    """Return the `torch.dtype` that the fields name."""
    name = _text(fields["name"], path)
    found = _torch_dtypes().get(name)
    if found is None:
        raise TrainStateFormatError(
            f"{render(path)}: the installed torch has no dtype called {short(name)}"
        )
    return found


def _decode_device(fields: Fields, path: Path) -> torch.device:
    """Return the `torch.device` that the fields name, whether or not this machine has it."""
    import torch

    name = _text(fields["name"], path)
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise TrainStateFormatError(
            f"{render(path)}: the installed torch does not know the device {short(name)}"
        ) from error


def _decode_tensor(fields: Fields, path: Path, fetch: Fetch) -> torch.Tensor:
    """Return a new CPU tensor with the stored values."""
    import torch

    from offload.ambient import neutral

    name = _text(fields["dtype"], path)
    dtype = _torch_dtypes().get(name)
    if dtype is None or name not in _TORCH_CODES:
        raise TrainStateFormatError(
            f"{render(path)}: the installed torch has no dtype called {short(name)} for a tensor"
        )
    stored = fetch(fields["tensor"])
    shape = _checked_shape(stored, name, path)
    with neutral():
        if not stored.data:
            return torch.empty(shape, dtype=dtype, device="cpu")
        raw = torch.frombuffer(bytearray(stored.data), dtype=torch.uint8)
        # The clone's memory is torch's own: aligned, and resizable.
        return raw.clone().view(dtype).reshape(shape)


def _decode_array(fields: Fields, path: Path, fetch: Fetch) -> np.ndarray[Any, Any]:
    """Return a new writable array with the stored values, in the stored byte order."""
    import numpy as np

    text = _text(fields["dtype"], path)
    wanted = _numpy_dtypes().get(text)
    if wanted is None:
        raise TrainStateFormatError(f"{render(path)}: {short(text)} is not a dtype of an array")
    stored = fetch(fields["tensor"])
    shape = _checked_shape(stored, wanted.name, path)
    flat = np.frombuffer(stored.data, dtype=wanted.newbyteorder("<"))
    return flat.reshape(shape).astype(wanted)


def _decode_scalar(fields: Fields, path: Path) -> object:
    """Return the numpy scalar that the fields describe."""
    import numpy as np

    name = _text(fields["dtype"], path)
    data = decode_base64(fields["base64"], path)
    if name not in _NUMPY_NAMES or np.dtype(name).itemsize != len(data):
        raise TrainStateFormatError(
            f"{render(path)}: {len(data)} bytes are not a numpy scalar of dtype {short(name)}"
        )
    return np.frombuffer(data, dtype=np.dtype(name).newbyteorder("<")).astype(name)[0]


ScalarDecoder = tuple[frozenset[str], Callable[[Fields, Path], object]]
"""The fields that a tag must have, and the function that turns them and a path into a value."""

LEAF_SCALARS: Mapping[str, ScalarDecoder] = {
    "torch.Size": (frozenset({"items"}), _decode_size),
    "torch.dtype": (frozenset({"name"}), _decode_dtype),
    "torch.device": (frozenset({"name"}), _decode_device),
    "numpy.scalar": (frozenset({"dtype", "base64"}), _decode_scalar),
}
"""Decoders of the tags that refer to no stored tensor, by tag."""

ARRAY_FIELDS = frozenset({"tensor", "dtype"})
"""The fields of every tag in `LEAF_ARRAYS`."""

LEAF_ARRAYS: Mapping[str, Callable[[Fields, Path, Fetch], object]] = {
    "torch.Tensor": _decode_tensor,
    "numpy.ndarray": _decode_array,
}
"""Decoders of the tags that refer to a stored tensor, by tag."""


def decode_base64(text: object, path: Path) -> bytes:
    """Return the bytes that `text` stands for; only the one canonical spelling is accepted."""
    if isinstance(text, str):
        try:
            data = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            data = b""
        if base64.b64encode(data).decode("ascii") == text:
            return data
    raise TrainStateFormatError(f"{render(path)}: not base64 text")


def _text(value: object, path: Path) -> str:
    if not isinstance(value, str):
        raise TrainStateFormatError(f"{render(path)}: a name is {short(value)}, expected text")
    return value


def _checked_shape(stored: StoredTensor, name: str, path: Path) -> tuple[int, ...]:
    """Return the shape of the value, after checking the stored tensor against the value's dtype."""
    code, factor = _TORCH_CODES[name]
    shape = tuple(stored.shape)
    fits = stored.dtype == code and (factor == 1 or shape[-1:] == (factor,))
    if not fits or math.prod(shape) * DTYPE_BYTES[code] != len(stored.data):
        raise TrainStateFormatError(
            f"{render(path)}: {len(stored.data)} bytes of {stored.dtype} with shape {shape} are "
            f"stored for a value of dtype {name}"
        )
    return shape[:-1] if factor > 1 else shape


@cache
def _torch_dtypes() -> Mapping[str, torch.dtype]:
    """Return torch's dtypes by name. Names from a file are looked up here, never with getattr."""
    import torch

    dtypes = (value for value in vars(torch).values() if isinstance(value, torch.dtype))
    return {str(dtype).removeprefix("torch."): dtype for dtype in dtypes}


@cache
def _numpy_dtypes() -> Mapping[str, np.dtype[Any]]:
    """Return the dtypes of arrays by their ``str``, in both byte orders."""
    import numpy as np

    native = [np.dtype(name) for name in sorted(_NUMPY_NAMES)]
    both = [
        swapped
        for dtype in native
        for swapped in (dtype.newbyteorder("<"), dtype.newbyteorder(">"))
    ]
    return {dtype.str: dtype for dtype in both}
