"""Decoder of `offload.format.train_state`, from JSON with tags to values.

The file is not trusted. Only the tags in a fixed table are known. No text of the file is ever
evaluated, imported or looked up as an attribute. Each stored tensor is used exactly once. Depth and
the length of numbers are bounded before anything is built from them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

from offload.errors import TrainStateFormatError, TrainStateTagError
from offload.format._train_state_encode import (
    FACTORIES,
    MAX_DEPTH,
    MAX_INT,
    MIN_INT,
    SPECIAL_FLOATS,
)
from offload.format._train_state_leaves import (
    ARRAY_FIELDS,
    LEAF_ARRAYS,
    LEAF_SCALARS,
    ROOT,
    TAG_KEY,
    Fields,
    Path,
    ScalarDecoder,
    StoredTensor,
    decode_base64,
    render,
)
from offload.format.strict_json import parse_json, short


def decode_text(text: str, tensors: Mapping[str, StoredTensor]) -> object:
    """Return the value that `text` and `tensors` encode."""
    decoder = _Decoder(tensors)
    value = decoder.decode(_parse(text), ROOT, 0)
    unused = [name for name in tensors if name not in decoder.used]
    if unused:
        raise TrainStateFormatError(
            f"train_state: {len(unused)} stored tensors belong to no value, the first is "
            f"{short(unused[0])}"
        )
    return value


def _parse(text: str) -> object:
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
        """Return the value that a JSON value stands for.

        Args:
            tree: JSON value, with tags.
            path: Path of the value, for messages.
            depth: Number of values that contain this one.

        Raises:
            TrainStateFormatError: The encoder would not have written this JSON value.
        """
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
        if tag in _SCALARS:
            names, scalar = _SCALARS[tag]
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


_SCALARS: Mapping[str, ScalarDecoder] = {
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
