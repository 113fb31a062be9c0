"""The manifest: everything about a checkpoint that its tensor files do not say themselves.

One JSON document, padded with spaces to a size reserved when the slot is made, so that writing it
never needs space. It is read by people, checked by a digest of its own, and never trusted beyond
that: every field is validated before anything is allocated from it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

from gds import ALIGNMENT
from offload.errors import ManifestError, OffloadError
from offload.formats import StateDtype
from offload.layout import Layout, ModelTensor, ParameterSpec
from offload.part_file import PartReference, SealedPart, content_digest, part_number
from offload.tensorfile import DTYPE_BYTES

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 2
MAX_MANIFEST_BYTES = 1 << 30
"""Bytes. A larger file is refused unread."""

MODEL_BLOCK_BYTES = 16 << 20
"""Bytes of ``model.safetensors`` data that one digest covers; the last block may be shorter."""

_MAX_SHARES = 1 << 16
"""Sum of the drives' shares: more would only cost time to deal chunks out."""

_SCALAR_KINDS = ("f32", "f64", "float", "int")
_MAX_DEPTH = 8
"""Tuples and lists within each other, in one hyper-parameter."""

_GROUP_RESERVE_BYTES = 16 << 10
_SCALAR_RESERVE_BYTES = 40
_PART_RESERVE_BYTES = 25 << 10
"""For a path of 4096 bytes, each of which JSON may have to write as six characters."""

ScalarValue = tuple[str, str, float | int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What one checkpoint is. Written last, so that its presence proves the rest."""

    store_id: str
    """32 hexadecimal digits that name the store, the same in all its checkpoints."""

    generation: int
    """Counter of the store; the checkpoint with the highest is the newest."""

    step: int
    """Optimizer steps taken."""

    created: str
    """ISO 8601 time at which the seal began. For people: nothing is decided by it."""

    torch_version: str
    optimizer: str
    """Qualified name of the wrapped optimizer class."""

    groups: tuple[Mapping[str, Any], ...]
    """Hyper-parameters of each parameter group."""

    layout: Layout

    scalars: tuple[tuple[ScalarValue, ...] | None, ...]
    """Per parameter in element-space order: its scalar state, or None if it has no state yet."""

    digests: Mapping[str, tuple[str | None, ...]]
    """Per state array: the digest of each chunk; None for a chunk that holds no state."""

    model_digests: tuple[str, ...]
    """The digest of each `MODEL_BLOCK_BYTES` of ``model.safetensors`` data."""

    parts: tuple[PartReference, ...] = ()
    """Where the state on each drive but the first is."""

    order: tuple[tuple[int, ...], ...] | None = None
    """For each parameter group its parameters, as positions in `Layout.model`, in the order in
    which the optimizer was given them: torch's state dicts go by it. None where it is not known."""

    def encode(self, reserved_bytes: int) -> bytes:
        """Return the file's content, padded to exactly `reserved_bytes`.

        Raises:
            OffloadError: The hyper-parameters have grown past what was reserved.
            TypeError: A hyper-parameter cannot be stored as JSON; names it.
        """
        layout = self.layout
        body = {
            "store_id": self.store_id,
            "generation": self.generation,
            "step": self.step,
            "created": self.created,
            "torch_version": self.torch_version,
            "optimizer": self.optimizer,
            "groups": [encode_group(i, group) for i, group in enumerate(self.groups)],
            "chunk_elements": layout.chunk_elements,
            "state_dtype": layout.state_dtype,
            "shares": list(layout.shares),
            "arrays": [[name, f.dtype, f.block] for name, f in layout.formats.items()],
            "parameters": [
                [p.name, p.dtype, list(p.shape), p.group, list(p.arrays)] for p in layout.parameters
            ],
            "model": [[t.name, t.dtype, list(t.shape), list(t.aliases)] for t in layout.model],
            "scalars": [
                None if s is None else [[n, k, repr(v)] for n, k, v in s] for s in self.scalars
            ],
            "model_block_bytes": MODEL_BLOCK_BYTES,
            "digests": {name: list(values) for name, values in self.digests.items()},
            "model_digests": list(self.model_digests),
            "parts": [asdict(part) for part in self.parts],
            "order": None if self.order is None else [list(group) for group in self.order],
        }
        document = {"format": FORMAT_VERSION, "digest": _body_digest(body), "body": body}
        text = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
        if len(text) + 1 > reserved_bytes:
            raise OffloadError(
                f"the manifest needs {len(text) + 1} bytes, but {reserved_bytes} were reserved "
                "when the store was laid out; parameter groups have gained large "
                "hyper-parameters. Keep such values in train_state instead."
            )
        return text.ljust(reserved_bytes - 1) + b"\n"


def reserved_bytes(layout: Layout, num_groups: int) -> int:
    """Return the size to reserve for the manifest of a layout, in bytes; a multiple of 4096."""
    names = sum(3 * len(json.dumps(p.name)) + 160 for p in layout.parameters)
    names += sum(
        2 * len(json.dumps(t.name)) + 100 + sum(len(json.dumps(a)) for a in t.aliases)
        for t in layout.model
    )
    # A rule keeps at most a handful of scalars (three in torch 2.13's ASGD) per parameter.
    scalars = 4 * _SCALAR_RESERVE_BYTES * len(layout.parameters)
    digests = 20 * layout.num_chunks * max(1, len(layout.array_names))
    digests += 20 * num_model_blocks(layout)
    parts = _PART_RESERVE_BYTES * (len(layout.shares) - 1)
    total = names + scalars + digests + parts + _GROUP_RESERVE_BYTES * (num_groups + 1)
    return -(-total // ALIGNMENT) * ALIGNMENT


def num_model_blocks(layout: Layout) -> int:
    """Return how many digests cover the data of ``model.safetensors``."""
    header = layout.model_header
    return -(-(header.file_bytes - header.data_start) // MODEL_BLOCK_BYTES)


def invalid_manifest(size_bytes: int) -> bytes:
    """Return content that no reader takes for a manifest, for a slot that is being rewritten."""
    text = json.dumps({"format": FORMAT_VERSION, "invalid": "this slot is being rewritten"})
    return text.encode().ljust(size_bytes - 1) + b"\n"


def decode(data: bytes, path: str) -> Manifest:
    """Read a manifest, trusting nothing in it.

    Raises:
        ManifestError: Not a manifest, damaged, of another version, or contradictory.
    """
    try:
        document = json.loads(
            data, object_pairs_hook=_unique_object, parse_constant=_refuse_constant
        )
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{path}: not a JSON document ({error})") from error
    if not isinstance(document, dict) or "format" not in document:
        raise ManifestError(f"{path}: not a manifest: it has no 'format'")
    if document["format"] != FORMAT_VERSION:
        raise ManifestError(
            f"{path}: format version {document['format']!r}, expected {FORMAT_VERSION}; it was "
            "written by another version of this package"
        )
    if "invalid" in document:
        raise ManifestError(f"{path}: withdrawn: {document['invalid']}")
    body = document.get("body")
    try:
        if not isinstance(body, dict) or document.get("digest") != _body_digest(body):
            raise ManifestError(f"{path}: damaged: its content does not match its digest")
        return _decode_body(body)
    except ManifestError:
        raise
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ManifestError(
            f"{path}: contradictory content ({type(error).__name__}: {error})"
        ) from error


def encode_group(index: int, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter group's hyper-parameters as JSON values, tuples and tensors tagged.

    Raises `TypeError` naming a hyper-parameter that is neither a number, a string, None, a
    sequence of those, nor a one-element tensor.
    """
    return {
        key: _encode_value(value, f"param_groups[{index}][{key!r}]")
        for key, value in group.items()
        if key not in ("params", "param_names")
    }


def decode_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Invert `encode_group`; one-element tensors come back as CPU tensors."""
    return {key: _decode_value(value) for key, value in group.items()}


def _encode_value(value: Any, where: str, depth: int = 0) -> Any:
    if depth > _MAX_DEPTH:
        raise TypeError(f"{where} is nested deeper than {_MAX_DEPTH} levels: flatten it")
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, list | tuple):
        items = [_encode_value(v, f"{where}[{i}]", depth + 1) for i, v in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    if type(value).__module__.startswith("torch") and getattr(value, "numel", lambda: 0)() == 1:
        return {
            "tensor": repr(value.item()),
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": list(value.shape),
        }
    raise TypeError(
        f"{where} is a {type(value).__name__} and cannot be stored in a checkpoint: use numbers, "
        "strings, None, tuples or lists of them, or one-element tensors"
    )


def _decode_value(value: Any, depth: int = 0) -> Any:
    if depth > _MAX_DEPTH:
        raise ValueError(f"a hyper-parameter nested deeper than {_MAX_DEPTH} levels")
    if isinstance(value, list):
        return [_decode_value(v, depth + 1) for v in value]
    if isinstance(value, dict):
        if "tuple" in value:
            return tuple(_decode_value(v, depth + 1) for v in value["tuple"])
        if "float" in value:
            return float(value["float"])
        import torch

        dtype = getattr(torch, _str(value["dtype"]), None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{value['dtype']!r} is not a torch dtype")
        if math.prod(_shape(value["shape"])) != 1:
            raise ValueError(f"a tensor of shape {value['shape']!r}, expected one element")
        number = float(value["tensor"]) if dtype.is_floating_point else int(value["tensor"])
        return torch.full(value["shape"], number, dtype=dtype)
    return value


def _body_digest(body: Mapping[str, Any]) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()


def _decode_body(body: Mapping[str, Any]) -> Manifest:
    parameters = tuple(
        ParameterSpec(_str(name), _dtype(dtype), _shape(shape), _count(group), _names(arrays))
        for name, dtype, shape, group, arrays in body["parameters"]
    )
    model = tuple(
        ModelTensor(_str(name), _dtype(dtype), _shape(shape), _names(aliases))
        for name, dtype, shape, aliases in body["model"]
    )
    chunk_elements = _count(body["chunk_elements"])
    if chunk_elements == 0 or chunk_elements % (ALIGNMENT // 4):
        raise ValueError(f"chunk_elements is {chunk_elements}, not a positive multiple of 1024")
    if body["state_dtype"] not in get_args(StateDtype):
        raise ValueError(f"unknown state_dtype {body['state_dtype']!r:.60}")
    shares = tuple(_count(share) for share in body["shares"])
    if not shares or 0 in shares or sum(shares) > _MAX_SHARES:
        raise ValueError(f"shares are {shares!r:.60}")
    layout = Layout(parameters, model, chunk_elements, body["state_dtype"], shares)
    stored = {t.name: (t.dtype, t.shape) for t in model}
    for p in parameters:
        if stored.get(p.name) != (p.dtype, p.shape):
            raise ValueError(f"parameter {p.name!r} differs from the model's tensor of that name")
    arrays = [[name, f.dtype, f.block] for name, f in layout.formats.items()]
    if arrays != body["arrays"]:
        raise ValueError(f"arrays are {body['arrays']!r:.200}, parameters have {arrays}")
    if body["model_block_bytes"] != MODEL_BLOCK_BYTES:
        raise ValueError(f"model_block_bytes is {body['model_block_bytes']!r}")
    groups = tuple(decode_group(_mapping(group)) for group in body["groups"])
    if any(p.group >= len(groups) for p in parameters):
        raise ValueError("a parameter belongs to a group that does not exist")
    scalars = tuple(
        None if s is None else tuple(_scalar(value) for value in s) for s in body["scalars"]
    )
    digests = {
        _str(name): tuple(None if d is None else _digest(d) for d in values)
        for name, values in _mapping(body["digests"]).items()
    }
    model_digests = tuple(_digest(d) for d in body["model_digests"])
    if len(scalars) != len(parameters):
        raise ValueError(f"{len(scalars)} scalar states for {len(parameters)} parameters")
    if set(digests) != set(layout.array_names) or any(
        len(values) != layout.num_chunks for values in digests.values()
    ):
        raise ValueError("there is not one digest for each chunk of each array")
    if len(model_digests) != num_model_blocks(layout):
        raise ValueError("there is not one digest for each block of the model file")
    store_id, generation = _str(body["store_id"]), _count(body["generation"])
    parts = tuple(_part(_mapping(part), generation) for part in body.get("parts", ()))
    expected = [
        SealedPart(store_id, generation, drive, content_digest(layout, digests, drive)).digest
        for drive in range(1, len(shares))
    ]
    if [part.digest for part in parts] != expected:
        raise ValueError("the parts on other drives are not those of its digests")
    order = body.get("order")  # older stores have none
    if order is not None:
        order = tuple(tuple(_count(position) for position in group) for group in order)
        if len(order) != len(groups) or any(p >= len(model) for group in order for p in group):
            raise ValueError("the order of parameters is not that of its groups")
    return Manifest(
        store_id=store_id,
        generation=generation,
        step=_count(body["step"]),
        created=_str(body["created"]),
        torch_version=_str(body["torch_version"]),
        optimizer=_str(body["optimizer"]),
        groups=groups,
        layout=layout,
        scalars=scalars,
        digests=digests,
        model_digests=model_digests,
        parts=parts,
        order=order,
    )


def _part(part: Mapping[str, Any], generation: int) -> PartReference:
    directory, name = _str(part["directory"]), _str(part["name"])
    if not directory.startswith("/") or "\0" in directory or part_number(name) is None:
        raise ValueError(f"{directory!r:.60}, {name!r:.60} is not the path of a part")
    if part["generation"] != generation:
        raise ValueError(f"a part of generation {part['generation']!r:.30}, expected {generation}")
    return PartReference(directory, name, generation, _str(part["digest"]))


def _str(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a string, got {value!r:.60}")
    return value


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0 or value >= 1 << 63:
        raise ValueError(f"expected a count, got {value!r:.60}")
    return value


def _dtype(value: Any) -> str:
    if value not in DTYPE_BYTES:
        raise ValueError(f"unknown dtype {value!r:.60}")
    return _str(value)


def _shape(value: Sequence[Any]) -> tuple[int, ...]:
    return tuple(_count(extent) for extent in value)


def _names(value: Sequence[Any]) -> tuple[str, ...]:
    return tuple(_str(name) for name in value)


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"expected an object, got {value!r:.60}")
    return value


def _digest(value: Any) -> str:
    if len(_str(value)) != 16:
        raise ValueError(f"expected 16 hexadecimal digits, got {value!r:.60}")
    return _str(value)


def _scalar(value: Sequence[Any]) -> ScalarValue:
    name, kind, text = value
    if kind not in _SCALAR_KINDS:
        raise ValueError(f"unknown kind of scalar {kind!r:.60}")
    return _str(name), kind, int(text) if kind == "int" else float(text)


def _unique_object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("an object names a key twice")
    return result


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")
