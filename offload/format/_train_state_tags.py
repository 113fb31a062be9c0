"""Values of `train_state` as JSON with tags, and back.

What JSON holds losslessly is plain JSON. Everything else is a *tag*: an object that has the key
``"$"`` with the name of a type, and exactly the fields that the type needs. The decoder trusts no
file: it knows the tags of fixed tables only, evaluates, imports and looks up nothing by a text of
the file, and uses each stored tensor once. Depth and numbers are bounded before anything is built.
"""

from __future__ import annotations

import base64
import enum
import json
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from offload.errors import TrainStateFormatError, TrainStateTagError, TrainStateTypeError
from offload.format._train_state_leaves import (
    ARRAY_FIELDS,
    LEAF_ARRAYS,
    LEAF_PACKAGES,
    LEAF_SCALARS,
    ROOT,
    TAG_KEY,
    Fields,
    Path,
    ScalarDecoder,
    StoredTensor,
    decode_base64,
    leaf_tag,
    render,
)
from offload.format.strict_json import parse_json, short

MAX_DEPTH = 100
"""Largest depth of values inside values. Real states have fewer than ten levels; Python's own stack
limits how large this can be."""

MIN_INT, MAX_INT = -(2**63), 2**64 - 1
"""Integers in this range are plain JSON numbers; others are tags, in base 16."""

FACTORIES: Mapping[str, Callable[[], object] | None] = {
    "None": None,
    **{kind.__name__: kind for kind in (bool, dict, float, int, list, set, str)},
}
"""Values for the `default_factory` of a defaultdict, by the name that is stored."""

SPECIAL_FLOATS: Mapping[str, float] = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
"""Floats that JSON has no number for, by stored name. Sign and payload of a NaN are not kept."""

_BUILTINS = (str, int, float, complex, bytes, bytearray, list, tuple, dict, set, frozenset, deque)


class Encoder:
    """Encoder of one value to JSON, which collects the bytes of its tensors in `tensors`."""

    def __init__(self) -> None:
        self.tensors: dict[str, StoredTensor] = {}
        self._open: set[int] = set()

    def encode(self, value: object, path: Path = ROOT, *, inline: bool = False) -> object:
        """Return the JSON value that stands for `value`; `inline` within a key or a set's member.

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

    def _container(self, value: Any, path: Path, inline: bool) -> object:
        kind = type(value)
        if kind is list:
            return self._items(value, path, inline)
        if kind in (tuple, deque):
            tag: Fields = {TAG_KEY: kind.__name__, "items": self._items(value, path, inline)}
            if kind is deque:
                tag["maxlen"] = value.maxlen
            return tag
        if kind in (set, frozenset):
            items = [self.encode(item, (path, "{{{}}}", item), inline=True) for item in value]
            # A set has no order. Sorting by text gives equal sets equal encodings.
            return {TAG_KEY: kind.__name__, "items": sorted(items, key=dump_json)}
        if kind is dict:
            if TAG_KEY not in value and all(_is_plain_text(key) for key in value):
                return {
                    key: self.encode(item, (path, "[{}]", key), inline=inline)
                    for key, item in value.items()
                }
            return {TAG_KEY: "dict", "items": self._pairs(value, path, inline)}
        if kind in (Counter, OrderedDict):
            return {TAG_KEY: kind.__name__, "items": self._pairs(value, path, inline)}
        if kind is defaultdict:
            names = [name for name, made in FACTORIES.items() if made is value.default_factory]
            if not names:
                raise TrainStateTypeError(
                    f"{render(path)}: cannot store the default_factory "
                    f"{short(value.default_factory)} of a defaultdict; store dict(...) of it"
                )
            items = self._pairs(value, path, inline)
            return {TAG_KEY: "defaultdict", "factory": names[0], "items": items}
        raise TrainStateTypeError(f"{render(path)}: {_refusal(value)}")

    def _items(self, value: Iterable[object], path: Path, inline: bool) -> list[object]:
        return [
            self.encode(item, (path, "[{}]", index), inline=inline)
            for index, item in enumerate(value)
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


def decode_text(text: str, tensors: Mapping[str, StoredTensor]) -> object:
    """Return the value that `text` and `tensors` encode."""
    decoder = _Decoder(tensors)
    value = decoder.decode(parse_text(text), ROOT, 0)
    unused = [name for name in tensors if name not in decoder.used]
    if unused:
        raise TrainStateFormatError(
            f"train_state: {len(unused)} stored tensors belong to no value, the first is "
            f"{short(unused[0])}"
        )
    return value


def parse_text(text: str) -> Any:
    """Return the JSON value of a text that is not trusted."""
    try:
        return parse_json(text.encode("utf-8", "surrogatepass"), max_values=None)
    except ValueError as error:
        raise TrainStateFormatError(f"train_state: not JSON: {error}") from error


class _Decoder:
    """Decoder of one JSON value, which records the tensors that it has used in `used`."""

    def __init__(self, tensors: Mapping[str, StoredTensor]) -> None:
        self.used: set[str] = set()
        self._tensors = tensors

    def decode(self, tree: object, path: Path, depth: int) -> Any:
        """Return the value that a JSON value at a path stands for, and refuse any other."""
        if depth > MAX_DEPTH:
            raise TrainStateFormatError(
                f"{render(path)}: nested deeper than {MAX_DEPTH} levels, which is never written"
            )
        if isinstance(tree, list):
            return self._items(tree, path, depth)
        if type(tree) is int and not MIN_INT <= tree <= MAX_INT:
            raise TrainStateFormatError(
                f"{render(path)}: {short(tree)} has more than 64 bits; such an integer must be "
                "stored with a tag"
            )
        if not isinstance(tree, dict):
            return tree
        if TAG_KEY not in tree:
            return {
                key: self.decode(value, (path, "[{}]", key), depth + 1)
                for key, value in tree.items()
            }
        tag = tree[TAG_KEY]
        if not isinstance(tag, str):
            raise TrainStateTagError(f"{render(path)}: the tag is a {type(tag).__name__}")
        if tag in _SCALAR_DECODERS:
            names, scalar = _SCALAR_DECODERS[tag]
            _check_fields(tree, names, path)
            return scalar(tree, path)
        if tag in LEAF_ARRAYS:
            _check_fields(tree, ARRAY_FIELDS, path)
            return LEAF_ARRAYS[tag](tree, path, self._fetch)
        if tag in _CONTAINERS:
            names, container = _CONTAINERS[tag]
            _check_fields(tree, names, path)
            return container(self, tree, path, depth)
        raise TrainStateTagError(
            f"{render(path)}: the tag {short(tag)} is unknown; the checkpoint was written by "
            "another version of this package, or is damaged"
        )

    def _fetch(self, name: object) -> StoredTensor:
        # Each tensor is used only once: with many references to one large tensor, a small file
        # would fill the memory.
        if not isinstance(name, str) or name not in self._tensors or name in self.used:
            raise TrainStateFormatError(
                f"train_state: the tensor {short(name)} is missing or used twice"
            )
        self.used.add(name)
        return self._tensors[name]

    def _items(self, items: object, path: Path, depth: int) -> list[Any]:
        return [
            self.decode(item, (path, "[{}]", index), depth + 1)
            for index, item in enumerate(_checked_list(items, path))
        ]

    def _tuple(self, fields: Fields, path: Path, depth: int) -> object:
        return tuple(self._items(fields["items"], path, depth))

    def _deque(self, fields: Fields, path: Path, depth: int) -> object:
        items, maxlen = self._items(fields["items"], path, depth), fields["maxlen"]
        if maxlen is not None and (type(maxlen) is not int or not len(items) <= maxlen < 2**63):
            raise TrainStateFormatError(
                f"{render(path)}: a deque of {len(items)} items cannot have the maxlen "
                f"{short(maxlen)}"
            )
        return deque(items, maxlen)

    def _set(self, fields: Fields, path: Path, depth: int) -> object:
        items = self._items(fields["items"], path, depth)
        try:
            members = frozenset(items)
        except TypeError as error:
            raise TrainStateFormatError(
                f"{render(path)}: a set has a member that cannot be in a set: {error}"
            ) from error
        if len(members) != len(items):
            raise TrainStateFormatError(f"{render(path)}: a set has a member twice")
        return members if fields[TAG_KEY] == "frozenset" else set(members)

    def _mapping(self, fields: Fields, path: Path, depth: int) -> object:
        pairs: dict[Any, Any] = {}
        items = _checked_list(fields["items"], path)
        for item in items:
            if not isinstance(item, list) or len(item) != 2:
                raise TrainStateFormatError(f"{render(path)}: an item is not a key and a value")
            key = self.decode(item[0], (path, ".keys({})", item[0]), depth + 1)
            value = self.decode(item[1], (path, "[{}]", key), depth + 1)
            try:
                pairs[key] = value
            except TypeError as error:
                raise TrainStateFormatError(
                    f"{render(path)}: a key cannot be used in a dict: {error}"
                ) from error
        if len(pairs) != len(items):
            raise TrainStateFormatError(f"{render(path)}: a key occurs twice")
        tag = fields[TAG_KEY]
        if tag == "OrderedDict":
            return OrderedDict(pairs)
        if tag == "Counter":
            # Counter(pairs) would take the counts for numbers, which they need not be.
            counter: Counter[Any] = Counter()
            dict.update(counter, pairs)
            return counter
        if tag == "defaultdict":
            factory = fields["factory"]
            if not isinstance(factory, str) or factory not in FACTORIES:
                raise TrainStateFormatError(
                    f"{render(path)}: the default_factory {short(factory)} is unknown"
                )
            return defaultdict(FACTORIES[factory], pairs)
        return pairs


_Decode = Callable[[_Decoder, Fields, Path, int], object]
_CONTAINERS: Mapping[str, tuple[frozenset[str], _Decode]] = {
    "tuple": (frozenset({"items"}), _Decoder._tuple),
    "deque": (frozenset({"items", "maxlen"}), _Decoder._deque),
    "set": (frozenset({"items"}), _Decoder._set),
    "frozenset": (frozenset({"items"}), _Decoder._set),
    "dict": (frozenset({"items"}), _Decoder._mapping),
    "Counter": (frozenset({"items"}), _Decoder._mapping),
    "OrderedDict": (frozenset({"items"}), _Decoder._mapping),
    "defaultdict": (frozenset({"items", "factory"}), _Decoder._mapping),
}


def _int(fields: Fields, path: Path) -> int:
    text = fields["hex"]
    try:
        value = int(text, 16) if isinstance(text, str) else 0
    except ValueError:
        value = 0
    if MIN_INT <= value <= MAX_INT or hex(value) != text:
        raise TrainStateFormatError(f"{render(path)}: not a large integer in base 16")
    return value


def _float(fields: Fields, path: Path) -> float:
    name = fields["value"]
    if not isinstance(name, str) or name not in SPECIAL_FLOATS:
        raise TrainStateFormatError(
            f"{render(path)}: the float {short(name)} is not one of {', '.join(SPECIAL_FLOATS)}"
        )
    return SPECIAL_FLOATS[name]


def _complex(fields: Fields, path: Path) -> complex:
    parts = fields["parts"]
    try:
        real, imaginary = (float(part) for part in parts)
        if [repr(real), repr(imaginary)] == parts:
            return complex(real, imaginary)
    except (TypeError, ValueError):
        pass
    raise TrainStateFormatError(f"{render(path)}: a complex number is not two floats as text")


def _str(fields: Fields, path: Path) -> str:
    try:
        return bytes.fromhex(fields["hex"]).decode("utf-8", "surrogatepass")
    except (TypeError, ValueError) as error:
        raise TrainStateFormatError(f"{render(path)}: not text in base 16: {error}") from error


def _bytes(fields: Fields, path: Path) -> bytes:
    return decode_base64(fields["base64"], path)


def _bytearray(fields: Fields, path: Path) -> bytearray:
    return bytearray(decode_base64(fields["base64"], path))


_SCALAR_DECODERS: Mapping[str, ScalarDecoder] = {
    **LEAF_SCALARS,
    "int": (frozenset({"hex"}), _int),
    "float": (frozenset({"value"}), _float),
    "complex": (frozenset({"parts"}), _complex),
    "str": (frozenset({"hex"}), _str),
    "bytes": (frozenset({"base64"}), _bytes),
    "bytearray": (frozenset({"base64"}), _bytearray),
}


def _check_fields(fields: Fields, names: frozenset[str], path: Path) -> None:
    if fields.keys() - {TAG_KEY} != names:
        raise TrainStateFormatError(
            f"{render(path)}: the tag {fields[TAG_KEY]!r} comes with {str(sorted(fields))[:120]}, "
            f"expected the fields {sorted(names)}"
        )


def _checked_list(items: object, path: Path) -> list[object]:
    if not isinstance(items, list):
        raise TrainStateFormatError(f"{render(path)}: a {type(items).__name__}, expected a list")
    return items
