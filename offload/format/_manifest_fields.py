"""Fields of a manifest: each is checked before anything is made from it.

The functions that read a field raise `ValueError` for a value that the encoder would not have
written. The message says what was found and what was expected.
"""

from __future__ import annotations

import datetime as dt
import math
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from offload.format.header import DTYPE_BYTES
from offload.format.names import part_number
from offload.format.part_file import PartReference
from offload.format.strict_json import is_text, short

T = TypeVar("T")

MAX_DEPTH = 8
"""Largest depth of tuples and lists within each other, in one hyper-parameter."""

MAX_COUNT = (1 << 63) - 1
"""Largest number of steps, generations, elements or bytes in a manifest."""

NOT_HYPERPARAMETERS = ("params", "param_names")
"""Keys of a parameter group that belong to the live model and are in no checkpoint."""

TENSOR_DTYPES = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
)
"""torch's names of the dtypes that are possible for a hyper-parameter that is a tensor."""

NUMPY_DTYPES = ("float64", "float32", "float16")
"""NumPy's names of the dtypes whose numbers stay NumPy's, because a Python number would change the
results: NumPy computes ``1 - lr * weight_decay`` in FP32 for an FP32 `lr`, and a schedule's product
of an FP64 and an FP32 number in FP64."""

_MAX_DIMS = 64
_STORE_ID = re.compile(r"[0-9a-f]{32}")
_DIGEST = re.compile(r"[0-9a-f]{16}")
_PART_DIGEST = _STORE_ID
TENSOR_KINDS = ("f32", "f64")
"""Kinds of scalar state that torch keeps in a 0-d tensor."""

_SCALAR_KINDS = (*TENSOR_KINDS, "float", "int")

ScalarValue = tuple[str, str, float | int]
"""Name, kind and value of one scalar in a parameter's state."""


def text(value: object) -> str:
    """Return the value if it is a string of Unicode text."""
    if not isinstance(value, str) or not is_text(value):
        raise ValueError(f"expected a string of Unicode text, got {short(value)}")
    return value


def label(value: object) -> str:
    """Return the value if it is a printable string of at most 1000 characters."""
    if not isinstance(value, str) or len(value) > 1000 or not value.isprintable():
        raise ValueError(f"expected a printable string, got {short(value)}")
    return value


def count(value: object) -> int:
    """Return the value if it is an integer from 0 to 2**63 - 1."""
    if type(value) is not int or not 0 <= value <= MAX_COUNT:
        raise ValueError(f"expected a count, got {short(value)}")
    return value


def items(value: object) -> list[Any]:
    """Return the value if it is a list."""
    if not isinstance(value, list):
        raise ValueError(f"expected a list, got {short(value)}")
    return value


def each(check: Callable[[Any], T], value: object) -> tuple[T, ...]:
    """Return what a function that checks a field returns for each item of a list."""
    return tuple(map(check, items(value)))


def mapping(value: object) -> dict[str, Any]:
    """Return the value if it is a JSON object."""
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, got {short(value)}")
    return value


def dtype(value: object) -> str:
    """Return the value if it is the safetensors code of a dtype."""
    if not isinstance(value, str) or value not in DTYPE_BYTES:
        raise ValueError(f"unknown dtype {short(value)}")
    return value


def shape(value: object) -> tuple[int, ...]:
    """Return a list of sizes as a tuple."""
    return each(count, value)


def names(value: object) -> tuple[str, ...]:
    """Return a list of distinct strings as a tuple."""
    found = each(text, value)
    if len(set(found)) != len(found):
        raise ValueError(f"a name occurs twice in {short(value)}")
    return found


def store_id(value: object) -> str:
    """Return the value if it is a string of 32 hexadecimal digits."""
    if not isinstance(value, str) or not _STORE_ID.fullmatch(value):
        raise ValueError(f"the store's id is {short(value)}, not 32 hexadecimal digits")
    return value


def time(value: object) -> str:
    """Return the value if it is a time in ISO 8601."""
    if not isinstance(value, str) or len(value) > 64:
        raise ValueError(f"expected a time in ISO 8601, got {short(value)}")
    dt.datetime.fromisoformat(value)
    return value


def digest(value: object) -> str:
    """Return the value if it is a string of 16 hexadecimal digits."""
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise ValueError(f"expected a digest of 16 hexadecimal digits, got {short(value)}")
    return value


def scalar(value: object) -> ScalarValue:
    """Return name, kind and value of one scalar in a parameter's state."""
    name, kind, written = items(value)
    if kind not in _SCALAR_KINDS:
        raise ValueError(f"unknown kind of scalar {short(kind)}")
    _require_number(written)
    number = int(written) if kind == "int" else float(written)
    if repr(number) != written or (kind == "int" and abs(number) > MAX_COUNT):
        raise ValueError(f"{short(written)} is not a number in its canonical form")
    return text(name), kind, number


def _require_number(written: object) -> None:
    if not isinstance(written, str) or len(written) > 32:
        raise ValueError(f"expected a number as text, got {short(written)}")


def part(value: object, generation: int) -> PartReference:
    """Return the reference to a part on another drive; the part must be of `generation`."""
    found = mapping(value)
    directory, name = found["directory"], text(found["name"])
    if not _is_absolute(directory) or part_number(name) is None:
        raise ValueError(f"{short(directory)}, {short(name)} is not the path of a part")
    if count(found["generation"]) != generation:
        raise ValueError(f"a part of generation {found['generation']}, expected {generation}")
    if not isinstance(found["digest"], str) or not _PART_DIGEST.fullmatch(found["digest"]):
        raise ValueError(f"the digest of a part is {short(found['digest'])}")
    return PartReference(directory, name, generation, found["digest"])


def _is_absolute(value: object) -> bool:
    if not isinstance(value, str) or not value.startswith("/") or "\0" in value:
        return False
    try:
        os.fsencode(value)  # accepts paths with bytes that are not UTF-8, unlike value.encode()
    except UnicodeEncodeError:
        return False
    return True


def without_numpy(value: Any) -> Any:
    """Return a value with Python's integers and truth values in place of NumPy's.

    Lists and tuples are searched. An array without a dimension becomes a number.
    """
    if type(value) in (list, tuple):
        return type(value)([without_numpy(item) for item in value])
    if type(value).__module__ != "numpy":
        return value
    import numpy as np

    if type(value) is np.ndarray and value.ndim == 0:
        value = value[()]
    if not isinstance(value, np.generic) or value.dtype.name in NUMPY_DTYPES:
        return value
    return value.item()


def encode_group(index: int, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter group's hyper-parameters as JSON values, with tags for tuples and tensors.

    Args:
        index: Index of the group, for messages.
        group: Hyper-parameters by name. The keys in `NOT_HYPERPARAMETERS` are left out.

    Raises:
        TypeError: A name is not Unicode text, or a hyper-parameter is neither a number (an integer
            must fit 64 bits), a string, None, a sequence of those, nor a one-element tensor. A
            number of NumPy is a number. The message names the hyper-parameter.
    """
    for key in group:
        if not is_text(key):
            raise TypeError(f"param_groups[{index}] has the key {key!r}: use Unicode text")
    return {
        key: _encode_value(without_numpy(value), f"param_groups[{index}][{key!r}]")
        for key, value in group.items()
        if key not in NOT_HYPERPARAMETERS
    }


def decode_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Invert `encode_group`; one-element tensors come back as CPU tensors."""
    for key in group:
        if key in NOT_HYPERPARAMETERS:
            raise ValueError(f"{key!r} is not a hyper-parameter: no checkpoint holds it")
    return {text(key): _decode_value(value) for key, value in group.items()}


def _encode_value(value: Any, where: str, depth: int = 0) -> Any:
    if depth > MAX_DEPTH:
        raise TypeError(f"{where} is nested deeper than {MAX_DEPTH} levels: flatten it")
    if isinstance(value, str) and not is_text(value):
        raise TypeError(f"{where} has a lone surrogate and cannot be stored: use Unicode text")
    if isinstance(value, int) and abs(value) > MAX_COUNT:
        raise TypeError(f"{where} is an integer of more than 64 bits: use a float or a string")
    if value is None or isinstance(value, bool | str | int):
        return value
    if type(value).__module__ == "numpy" and type(value).__name__ in NUMPY_DTYPES:
        return {"numpy": repr(value.item()), "dtype": type(value).__name__}
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, list | tuple):
        found = [_encode_value(v, f"{where}[{i}]", depth + 1) for i, v in enumerate(value)]
        return {"tuple": found} if isinstance(value, tuple) else found
    if type(value).__module__.startswith("torch") and getattr(value, "numel", lambda: 0)() == 1:
        name = str(value.dtype).removeprefix("torch.")
        if name in TENSOR_DTYPES:
            return {"tensor": repr(value.item()), "dtype": name, "shape": list(value.shape)}
    raise TypeError(
        f"{where} is a {type(value).__name__} and cannot be stored in a checkpoint: use numbers, "
        "strings, None, tuples or lists of them, or one-element tensors of a real dtype"
    )


def _decode_value(value: Any, depth: int = 0) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError(f"a hyper-parameter nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, str):
        return text(value)
    if isinstance(value, list):
        return [_decode_value(v, depth + 1) for v in value]
    if isinstance(value, dict):
        if value.keys() == {"tuple"}:
            return tuple(_decode_value(v, depth + 1) for v in items(value["tuple"]))
        if value.keys() == {"float"}:
            if value["float"] not in ("inf", "-inf", "nan"):
                raise ValueError(f"expected inf, -inf or nan, got {short(value['float'])}")
            return float(value["float"])
        return _decode_numpy(value) if "numpy" in value else _decode_tensor(value)
    if isinstance(value, int) and abs(value) > MAX_COUNT:
        raise ValueError(f"a hyper-parameter is {value}, which does not fit into 64 bits")
    return value


def _decode_numpy(value: Mapping[str, Any]) -> Any:
    if value.keys() != {"numpy", "dtype"} or value["dtype"] not in NUMPY_DTYPES:
        raise ValueError(f"a hyper-parameter is an object with {short(sorted(value))}")
    written = value["numpy"]
    _require_number(written)
    import numpy as np

    with np.errstate(over="ignore"):
        number = np.dtype(value["dtype"]).type(float(written))
    if repr(number.item()) != written:
        raise ValueError(f"{short(written)} is not a {value['dtype']} in its canonical form")
    return number


def _decode_tensor(value: Mapping[str, Any]) -> Any:
    if value.keys() != {"tensor", "dtype", "shape"}:
        raise ValueError(f"a hyper-parameter is an object with {short(sorted(value))}")
    # Only listed names are looked up: another attribute of torch might import one of its modules.
    if value["dtype"] not in TENSOR_DTYPES:
        raise ValueError(f"{short(value['dtype'])} is not the dtype of a hyper-parameter")
    sizes, written = shape(value["shape"]), value["tensor"]
    if any(size != 1 for size in sizes) or len(sizes) > _MAX_DIMS:
        raise ValueError(f"a tensor of shape {short(value['shape'])}, expected one element")
    _require_number(written)
    import torch

    from offload.ambient import neutral

    torch_dtype: torch.dtype = getattr(torch, value["dtype"])
    number = float(written) if torch_dtype.is_floating_point else int(written)
    try:
        with neutral():
            tensor = torch.full(sizes, number, dtype=torch_dtype, device="cpu")
    except RuntimeError as error:
        raise ValueError(f"{short(written)} is not a {value['dtype']}") from error
    if repr(tensor.item()) != written:
        raise ValueError(f"{short(written)} is not a {value['dtype']} in its canonical form")
    return tensor
