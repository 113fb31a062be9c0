"""Fields of a manifest, and of an owner's table, that describe a layout.

As in `_manifest_fields`, each function that reads a field raises `ValueError` for a value that the
encoder would not have written.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from gds import ALIGNMENT
from offload.format import _manifest_fields as fields
from offload.format._manifest_fields import ScalarValue
from offload.format.arrays import StateDtype, is_array_name
from offload.format.boxes import Box, Cut
from offload.format.layout import Layout, ModelTensor, ParameterSpec
from offload.format.strict_json import short

_MAX_ARRAYS = 64
"""Largest number of state arrays of a store."""


Scalars = tuple[tuple[ScalarValue, ...] | None, ...]
"""For each parameter in element-space order, its scalar state; None if it has no state yet."""

Digests = Mapping[str, tuple[str | None, ...]]
"""For each state array, the digest of each chunk; None for a chunk that holds no state."""


def encode_state(layout: Layout, scalars: Scalars, digests: Digests) -> dict[str, Any]:
    """Return the fields that a manifest and an owner's table share."""
    return {
        "chunk_elements": layout.chunk_elements,
        "state_dtype": layout.state_dtype,
        "arrays": [[name, f.dtype, f.block] for name, f in layout.formats.items()],
        "parameters": [_encode_parameter(p) for p in layout.parameters],
        "scalars": encode_scalars(scalars),
        "digests": {name: list(values) for name, values in digests.items()},
    }


def encode_scalars(scalars: Iterable[tuple[ScalarValue, ...] | None]) -> list[Any]:
    """Return the scalar state of each parameter, in element-space order."""
    return [None if s is None else [[n, k, _written(k, v)] for n, k, v in s] for s in scalars]


def decode_scalars(value: object, expected: int) -> Scalars:
    """Invert `encode_scalars`, for a number of parameters; raise ValueError for anything else."""
    found = tuple(None if s is None else fields.each(fields.scalar, s) for s in fields.items(value))
    if len(found) != expected:
        raise ValueError(f"{len(found)} scalar states for {expected} parameters")
    return found


def _written(kind: str, value: float | int) -> str:
    return repr(int(value) if kind == "int" else float(value))


def _encode_parameter(spec: ParameterSpec) -> list[Any]:
    if spec.cut is None:
        return [spec.name, spec.dtype, list(spec.shape), spec.group, list(spec.arrays)]
    whole, box = list(spec.cut.shape), encode_box(spec.cut.box)
    return [spec.name, spec.dtype, whole, spec.group, list(spec.arrays), box]


def encode_box(box: Box) -> list[list[int]]:
    """Return a box as its offsets and its sizes."""
    return [list(box.offsets), list(box.sizes)]


def box(value: object) -> Box:
    """Return a box; `Cut` and `Box.fits` compare it with a shape."""
    offsets, sizes = fields.items(value)
    return Box(fields.shape(offsets), fields.shape(sizes))


def decode_state(
    body: Mapping[str, Any],
    model: tuple[ModelTensor, ...],
    shares: tuple[int, ...],
    num_groups: int,
) -> tuple[Layout, Scalars, Digests]:
    """Return the layout, the scalars and the digests that `encode_state` was given."""
    layout = _decode_layout(body, model, shares)
    if any(p.group >= num_groups for p in layout.parameters):
        raise ValueError("a parameter belongs to a group that does not exist")
    scalars = decode_scalars(body["scalars"], len(layout.parameters))
    digests = {
        name: tuple(None if d is None else fields.digest(d) for d in fields.items(values))
        for name, values in fields.mapping(body["digests"]).items()
    }
    if digests.keys() != set(layout.array_names) or any(
        len(values) != layout.num_chunks for values in digests.values()
    ):
        raise ValueError("there is not one digest for each chunk of each array")
    # Each chunk is now known to have a digest in the file. So the file's length bounds the time and
    # the memory that whatever follows takes.
    _ = layout.array_headers  # refuses names that no header can hold
    return layout, scalars, digests


def _decode_layout(
    body: Mapping[str, Any], model: tuple[ModelTensor, ...], shares: tuple[int, ...]
) -> Layout:
    parameters = fields.each(_decode_parameter, body["parameters"])
    chunk_elements = fields.count(body["chunk_elements"])
    if chunk_elements == 0 or chunk_elements % (ALIGNMENT // 4):
        raise ValueError(f"chunk_elements is {chunk_elements}, not a positive multiple of 1024")
    if body["state_dtype"] not in get_args(StateDtype):
        raise ValueError(f"unknown state_dtype {short(body['state_dtype'])}")
    layout = Layout(parameters, model, chunk_elements, body["state_dtype"], shares)
    stored = {t.name: (t.dtype, t.shape) for t in model}
    for p in parameters:
        if stored.get(p.name) != (p.dtype, p.shape if p.cut is None else p.cut.shape):
            raise ValueError(f"parameter {short(p.name)} differs from the model's tensor")
    _require_apart(parameters)
    _require_array_names(layout.array_names)
    arrays = [[name, f.dtype, f.block] for name, f in layout.formats.items()]
    if arrays != body["arrays"]:
        raise ValueError(f"arrays are {short(body['arrays'])}, parameters have {arrays}")
    return layout


def _require_array_names(names: tuple[str, ...]) -> None:
    if len(names) > _MAX_ARRAYS:
        raise ValueError(f"{len(names)} state arrays, at most {_MAX_ARRAYS} are read")
    for name in names:
        if not is_array_name(name):  # the name is also a file's
            raise ValueError(f"{short(name)} is not the name of a state array")


def decode_dropped(value: object) -> tuple[str, ...]:
    """Return the names of the state arrays that a checkpoint has given up."""
    names = fields.names(value)
    _require_array_names(names)
    return names


def _decode_parameter(value: object) -> ParameterSpec:
    value = fields.items(value)
    if len(value) not in (5, 6):
        raise ValueError(f"a parameter is described by {len(value)} values")
    name, dtype, shape, group, arrays, *rest = value
    whole = fields.shape(shape)
    cut = Cut(whole, box(rest[0])) if rest else None
    return ParameterSpec(
        fields.text(name),
        fields.dtype(dtype),
        whole if cut is None else cut.box.sizes,
        fields.count(group),
        fields.names(arrays),
        cut,
    )


def _require_apart(parameters: Iterable[ParameterSpec]) -> None:
    """Refuse boxes that occur twice, or that have more elements than their parameter.

    Time and memory are proportional to the number of boxes. So boxes that overlap in another way
    are not found here; `offload.format.shares.owners.require_exact_cover` finds them.
    """
    names = [p.stored_name for p in parameters]
    if len(set(names)) < len(names):
        raise ValueError("a parameter, or a box of one, occurs twice")
    held: Counter[str] = Counter()
    for p in parameters:
        held[p.name] += p.num_elements
        if held[p.name] > math.prod(p.shape if p.cut is None else p.cut.shape):
            raise ValueError(f"the boxes of parameter {short(p.name)} overlap")
