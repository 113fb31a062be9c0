"""Size of a model, from a number, a ``config.json``, safetensors files, or a store."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from gds import StorageError
from offload.checkpoint.checkpoint import require_one_owner
from offload.checkpoint.opening import open_for_parameters
from offload.errors import CheckpointError, SizingError
from offload.format.header import (
    DTYPE_BYTES,
    MAX_HEADER_BYTES,
    Header,
    TensorFileError,
    read_header,
)
from offload.format.layout import (
    Layout,
    ModelTensor,
    ParameterSpec,
    element_space_order,
    model_order,
)
from offload.format.names import LOCK_NAME, MANIFEST_NAME, TRAIN_STATE_NAME, step_of
from offload.format.strict_json import is_text, parse_json
from offload.sizing.checks import open_regular, read_regular, shown, shown_path
from offload.sizing.hf_config import MAX_TENSORS, NamedShape, tensors_of
from offload.sizing.state import Precision, num_arrays
from offload.units import many

_FLOATS = ("BF16", "F16", "F32")
"""Dtypes of tensors that count as parameters; tensors of other dtypes count as buffers."""

_NUMBER = re.compile(
    r"\s*(\d[\d_]*(?:\.\d+)?(?:e\+?\d+)?)\s*([kmbt]?)\s*", re.IGNORECASE | re.ASCII
)
_POWERS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}

_CONFIG_NAME = "config.json"
_MAX_CONFIG_BYTES = 16 << 20
_MOST_HEADER_BYTES = 32 << 20
_MAX_PARAMETERS = 10**18
_MAX_CHUNKS = 1 << 18
"""Largest number of chunks of a model whose tensors are known. Finding out the sizes of the files
takes some seconds for so many."""

_WEIGHTS_SUFFIX = ".safetensors"


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Size of a model and of its optimizer state."""

    source: str
    """Source of the size, as text for people."""

    num_parameters: int
    """Number of trainable elements."""

    parameter_bytes: float
    """Bytes of ``model.safetensors`` without its header: parameters, and buffers if known."""

    gradient_bytes: float
    """Bytes of the gradients of all parameters."""

    state_bytes: float
    """Bytes of all state arrays without headers."""

    memory_state_bytes: float
    """Bytes of the same state in memory, as FP32."""

    layout: Layout | None
    """Layout that a store of the model has; None if only the number of parameters is known."""

    num_groups: int | None = None
    """Number of parameter groups; None if the model is not read from a store."""

    train_state_bytes: int | None = None
    """Bytes reserved for the train state; None if the model is not read from a store."""


def model_size(
    model: int | float | str | os.PathLike[str],
    precision: Precision,
    *,
    chunk_elements: int,
    shares: tuple[int, ...] = (1,),
) -> ModelSize:
    """Return the size of a model."""
    number = _number(model)
    if number is not None:
        return ModelSize(
            _parameters(number),
            number,
            number * precision.parameter_bytes,
            number * precision.parameter_bytes,
            number * precision.state_bytes,
            number * precision.memory_state_bytes,
            None,
        )
    path = os.fsdecode(model)  # type: ignore[arg-type]  # a number has been returned
    if not os.path.exists(path):
        raise SizingError(
            f"{shown_path(path)}: neither a number of parameters, such as 7B or 6.7e9, nor a file "
            "or directory"
        )
    if os.path.isdir(path):
        try:
            names = os.listdir(path)
        except OSError as error:
            raise SizingError(f"{path}: {error.strerror}") from error
        if {MANIFEST_NAME, LOCK_NAME} & {*names} or any(
            step_of(name) is not None for name in names
        ):
            return _of_store(path)
        path = _file_in(path, names)
    if path.endswith(_WEIGHTS_SUFFIX):
        return _of_tensors(_weights([path]), path, precision, chunk_elements, shares)
    if path.endswith(".index.json"):
        return _of_tensors(_weights(_shards(path)), path, precision, chunk_elements, shares)
    tensors = [(t, precision.code) for t in tensors_of(_read_json(path), path)]
    return _of_tensors(tensors, path, precision, chunk_elements, shares)


def _number(model: object) -> int | None:
    """Return a number of parameters; None if the model is not given as one."""
    if isinstance(model, bool):
        raise SizingError(f"the model is {model!r}, expected a number of parameters or a path")
    if isinstance(model, str):
        match = _NUMBER.fullmatch(model)
        if match is None or os.path.exists(model):
            return None
        value = float(match[1].replace("_", "")) * _POWERS[match[2].lower()]
    elif isinstance(model, int | float):
        value = model
    else:
        return None
    _require_size(value, f"the model has {shown(model)}")
    return round(value)


def _parameters(number: int) -> str:
    return f"{number:,} parameter{'' if number == 1 else 's'}"


def _require_size(number: float, subject: str) -> None:
    if not 1 <= number <= _MAX_PARAMETERS:
        raise SizingError(f"{subject} parameters, expected 1 to {_MAX_PARAMETERS:g}")


def _file_in(directory: str, names: Iterable[str]) -> str:
    """Return the file that describes the model of a directory: weights, or else ``config.json``."""
    weights = [name for name in names if name.endswith(_WEIGHTS_SUFFIX)]
    indices = [name for name in names if name.endswith(_WEIGHTS_SUFFIX + ".index.json")]
    for found in (indices, weights, [n for n in names if n == _CONFIG_NAME]):
        if len(found) > 1:
            raise SizingError(
                f"{directory}: it has {', '.join(sorted(found))}: name the file that is meant"
            )
        if found:
            return os.path.join(directory, found[0])
    raise SizingError(
        f"{directory}: it has neither safetensors files, nor {_CONFIG_NAME}, nor a store"
    )


def _shards(index: str) -> list[str]:
    """Return the paths of the files that an index of safetensors files names."""
    named = _read_json(index).get("weight_map")
    if not isinstance(named, dict) or not all(isinstance(n, str) for n in named.values()):
        raise SizingError(f"{index}: weight_map is not a map of tensor names to file names")
    files = sorted({str(name) for name in named.values()})
    for name in files:
        if not is_text(name) or name in ("", ".", "..") or "/" in name or "\0" in name:
            raise SizingError(f"{index}: it names {shown(name)}, expected a file beside it")
    return [os.path.join(os.path.dirname(index), name) for name in files]


def _weights(paths: Iterable[str]) -> list[tuple[NamedShape, str]]:
    """Return name, shape and dtype of every tensor in safetensors files."""
    found: list[tuple[NamedShape, str]] = []
    for path in paths:
        entries = _header(path).entries
        if len(found) + len(entries) > MAX_TENSORS:
            raise SizingError(f"{path}: more than {MAX_TENSORS} tensors")
        found += [(NamedShape(e.name, e.shape), e.dtype) for e in entries.values()]
    return found


def _header(path: str) -> Header:
    """Read the header of a safetensors file, unless that would take many seconds."""
    with open(open_regular(path), "rb") as file:
        number = file.fileno()
        try:
            length = int.from_bytes(os.pread(number, 8, 0), "little")
            if _MOST_HEADER_BYTES < length <= MAX_HEADER_BYTES:
                raise SizingError(
                    f"{path}: a header of {length} bytes, at most {_MOST_HEADER_BYTES} are read"
                )
            return read_header(
                lambda offset, num_bytes: os.pread(number, num_bytes, offset),
                os.fstat(number).st_size,
                path,
            )
        except OSError as error:
            raise SizingError(f"{path}: {error.strerror}") from error
        except TensorFileError as error:
            raise SizingError(str(error)) from error


def _read_json(path: str) -> dict[str, object]:
    content = read_regular(path, _MAX_CONFIG_BYTES)
    try:
        value = parse_json(content)
    except ValueError as error:
        raise SizingError(f"{path}: not a JSON file: {error}") from error
    if not isinstance(value, dict):
        raise SizingError(f"{path}: a JSON {type(value).__name__}, expected an object")
    return value


def _of_tensors(
    tensors: Iterable[tuple[NamedShape, str]],
    path: str,
    precision: Precision,
    chunk_elements: int,
    shares: tuple[int, ...],
) -> ModelSize:
    """Return the size of a model of which every tensor is known; floating ones are trained."""
    arrays = precision.arrays
    specs, trained, others = [], [], []
    for (name, shape), dtype in tensors:
        if dtype in _FLOATS:
            specs.append(ParameterSpec(name, precision.code, shape, 0, arrays))
            trained.append(ModelTensor(name, precision.code, shape))
        else:
            others.append(ModelTensor(name, dtype, shape))
    if not specs:
        raise SizingError(f"{path}: no tensor is of a dtype that is trained ({', '.join(_FLOATS)})")
    layout = Layout(
        tuple(element_space_order(specs)),
        model_order(trained, others),
        chunk_elements,
        precision.state_dtype,
        shares,
    )
    number = layout.num_elements
    _require_size(number, f"{path}: {number:,}")
    if number > _MAX_CHUNKS * chunk_elements:
        raise SizingError(
            f"{path}: a store of it has {layout.num_chunks:,} chunks, at most {_MAX_CHUNKS:,} are "
            "expected: give the number of parameters instead, or larger chunks"
        )
    try:
        layout.model_header  # noqa: B018  # computed here, so that a failure names the path
    except TensorFileError as error:
        raise SizingError(f"{path}: {error}") from error
    return _of_layout(f"{path}: {_parameters(number)} in {many(len(specs), 'tensor')}", layout)


def _of_store(path: str) -> ModelSize:
    try:
        with open_for_parameters(path) as checkpoint:
            require_one_owner(checkpoint)
            layout = checkpoint.manifest.layout
            number = _parameters(layout.num_elements)
            found = _of_layout(f"{checkpoint.path}: step {checkpoint.step}, {number}", layout)
            return replace(
                found,
                num_groups=len(checkpoint.manifest.groups),
                train_state_bytes=checkpoint.files[TRAIN_STATE_NAME],
            )
    except (CheckpointError, StorageError) as error:
        raise SizingError(str(error)) from error


def _of_layout(source: str, layout: Layout) -> ModelSize:
    return ModelSize(
        source,
        layout.num_elements,
        sum(tensor.nbytes for tensor in layout.model),
        sum(p.num_elements * DTYPE_BYTES[p.dtype] for p in layout.parameters),
        layout.state_bytes,
        sum(4 * p.num_elements * num_arrays(p.arrays) for p in layout.parameters),
        layout,
    )
