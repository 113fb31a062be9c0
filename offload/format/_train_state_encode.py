"""Encoder of `train_state`, from values to JSON with tags, and definitions for the decoder.

Values that JSON holds losslessly are plain JSON: None, bool, 64-bit integers, finite floats,
strings, lists, and dicts whose keys are strings. Everything else is a *tag*: an object that has the
key ``"$"`` with the name of a type, and exactly the fields that the type needs. A dict that has
``"$"`` as a key of its own is written as a tag too, so that no value in a state can be mistaken for
a tag.
"""

from __future__ import annotations

import base64
import enum
import json
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from offload.errors import TrainStateTypeError
from offload.format._train_state_leaves import (
    LEAF_PACKAGES,
    ROOT,
    TAG_KEY,
    Fields,
    Path,
    StoredTensor,
    leaf_tag,
    render,
)
from offload.format.strict_json import short

MAX_DEPTH = 100
"""Largest depth of values inside values. Real states have fewer than ten levels; Python's own stack
limits how large this can be."""

MIN_INT, MAX_INT = -(2**63), 2**64 - 1
"""Integers in this range are plain JSON numbers; others are tags, in base 16."""

FACTORIES: Mapping[str, Callable[[], object] | None] = {
    "None": None,
    "bool": bool,
    "dict": dict,
    "float": float,
    "int": int,
    "list": list,
    "set": set,
    "str": str,
}
"""Values for the `default_factory` of a defaultdict, by the name that is stored."""

SPECIAL_FLOATS: Mapping[str, float] = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
"""Floats that JSON has no number for, by stored name. Sign and payload of a NaN are not kept."""

_SEQUENCES: Mapping[type, str] = {tuple: "tuple", deque: "deque"}
_SETS: Mapping[type, str] = {set: "set", frozenset: "frozenset"}
_PAIRS: Mapping[type, str] = {Counter: "Counter", OrderedDict: "OrderedDict"}
_BUILTINS = (str, int, float, complex, bytes, bytearray, list, tuple, dict, set, frozenset, deque)


class Encoder:
    """Encoder of one value to JSON, which collects the bytes of its tensors in `tensors`."""

    def __init__(self) -> None:
        self.tensors: dict[str, StoredTensor] = {}
        self._open: set[int] = set()

    def encode(self, value: object, path: Path = ROOT, *, inline: bool = False) -> object:
        """Return the JSON value that stands for `value`.

        Args:
            value: Value to encode.
            path: Path of the value, for messages.
            inline: Whether the value is part of a key or of a member of a set.

        Raises:
            TrainStateTypeError: The value, or a value in it, could not be restored unchanged.
        """
        kind = type(value)
        if value is None or kind is bool:
            return value
        # Only exact types match: of a subclass (an IntEnum, a namedtuple) only the base value would
        # be stored.
        encode = _SCALARS.get(kind)
        if encode is not None:
            return encode(value)
        if kind.__module__.partition(".")[0] in LEAF_PACKAGES:
            fields = leaf_tag(value, path, None if inline else self._store)
            if fields is not None:
                return fields
        if id(value) in self._open:
            raise TrainStateTypeError(f"{render(path)}: contains itself; store a copy of a part")
        if len(self._open) >= MAX_DEPTH:
            raise TrainStateTypeError(
                f"{render(path)}: nested deeper than {MAX_DEPTH} levels; store it flatter"
            )
        self._open.add(id(value))
        try:
            return self._container(value, path, inline)
        finally:
            self._open.remove(id(value))

    def _container(self, value: object, path: Path, inline: bool) -> object:
        kind = type(value)
        if kind is list:
            return self._items(value, path, inline)
        if kind in _SEQUENCES:
            tag: Fields = {TAG_KEY: _SEQUENCES[kind], "items": self._items(value, path, inline)}
            if isinstance(value, deque):
                tag["maxlen"] = value.maxlen
            return tag
        if kind in _SETS:
            items = [
                self.encode(item, (path, "{{{}}}", item), inline=True) for item in _iter(value)
            ]
            # A set has no order. Sorting by text gives equal sets equal encodings.
            return {TAG_KEY: _SETS[kind], "items": sorted(items, key=dump_json)}
        if kind is dict and isinstance(value, dict):
            if TAG_KEY not in value and all(_is_plain_text(key) for key in value):
                return {
                    key: self.encode(item, (path, "[{}]", key), inline=inline)
                    for key, item in value.items()
                }
            return {TAG_KEY: "dict", "items": self._pairs(value, path, inline)}
        if kind in _PAIRS and isinstance(value, dict):
            return {TAG_KEY: _PAIRS[kind], "items": self._pairs(value, path, inline)}
        if kind is defaultdict and isinstance(value, defaultdict):
            names = [name for name, made in FACTORIES.items() if made is value.default_factory]
            if not names:
                raise TrainStateTypeError(
                    f"{render(path)}: cannot store the default_factory "
                    f"{short(value.default_factory)} of a defaultdict; store dict(...) of it"
                )
            items = self._pairs(value, path, inline)
            return {TAG_KEY: "defaultdict", "factory": names[0], "items": items}
        raise TrainStateTypeError(f"{render(path)}: {_refusal(value)}")

    def _items(self, value: object, path: Path, inline: bool) -> list[object]:
        return [
            self.encode(item, (path, "[{}]", index), inline=inline)
            for index, item in enumerate(_iter(value))
        ]

    def _pairs(self, value: dict[Any, Any], path: Path, inline: bool) -> list[object]:
        return [
            [
                self.encode(key, (path, ".keys({})", key), inline=True),
                self.encode(item, (path, "[{}]", key), inline=inline),
            ]
            for key, item in value.items()
        ]

    def _store(self, tensor: StoredTensor) -> str:
        name = f"tensor.{len(self.tensors)}"
        self.tensors[name] = tensor
        return name


def dump_json(tree: object) -> str:
    """Return the only JSON text that stands for an encoded value.

    The text is valid UTF-8 and has no NaN.
    """
    return json.dumps(tree, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _encode_int(value: int) -> object:
    return value if MIN_INT <= value <= MAX_INT else {TAG_KEY: "int", "hex": hex(value)}


def _encode_float(value: float) -> object:
    return value if math.isfinite(value) else {TAG_KEY: "float", "value": repr(value)}


def _encode_str(value: str) -> object:
    if _is_plain_text(value):
        return value
    # Escapes would not do: a JSON reader joins two lone surrogates into one character.
    return {TAG_KEY: "str", "hex": value.encode("utf-8", "surrogatepass").hex()}


def _encode_complex(value: complex) -> object:
    return {TAG_KEY: "complex", "parts": [repr(value.real), repr(value.imag)]}


def _encode_bytes(value: bytes) -> object:
    # Bytes are stored inline, although a tensor would be smaller: within a set, the tensor's name
    # would depend on the order of the members.
    return {TAG_KEY: type(value).__name__, "base64": base64.b64encode(value).decode("ascii")}


_SCALARS: Mapping[type, Callable[[Any], object]] = {
    int: _encode_int,
    float: _encode_float,
    str: _encode_str,
    complex: _encode_complex,
    bytes: _encode_bytes,
    bytearray: _encode_bytes,
}


def _iter(value: object) -> Iterable[object]:
    return value  # type: ignore[return-value]


def _is_plain_text(value: object) -> bool:
    return type(value) is str and (
        value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value)
    )


def _refusal(value: object) -> str:
    """Return why a value of an unsupported type is refused, and what to store instead."""
    kind = type(value)
    named = f"cannot store a value of type {kind.__module__}.{kind.__qualname__}"
    if kind.__module__.startswith("torch") and hasattr(value, "get_state"):
        return f"{named}; store its get_state() instead"
    if callable(getattr(value, "state_dict", None)):
        return f"{named}; store its state_dict() instead"
    if kind.__module__.startswith("torch") and hasattr(value, "detach"):
        return (
            f"{named}: only plain tensors can be stored; store its values (p.detach() of a "
            "Parameter)"
        )
    if isinstance(value, enum.Enum):
        return f"{named}: restoring imports no modules; store its .name or .value instead"
    for base in _BUILTINS:
        if isinstance(value, base):
            return (
                f"{named}: restoring imports no modules, so it would become a plain "
                f"{base.__name__}; store its fields (or {base.__name__}(value)) instead"
            )
    return f"{named}: restoring imports no modules; store its fields instead"
