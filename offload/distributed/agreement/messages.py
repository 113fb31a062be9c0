"""Messages between ranks: one JSON object each, with a version, and checked when it is read.

Ranks may run different versions of this package by mistake, and may reach the same point of the
protocol from different calls. So no message is trusted: every field must be there, of its type, and
no other field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeAlias

from offload.errors import RanksError
from offload.format.strict_json import parse_json, short

VERSION = 2
"""Version of all messages; ranks with different versions cannot train together."""

Json: TypeAlias = Any
"""A value that JSON can hold."""

_JSON_TYPES: Mapping[type, str] = {
    str: "a text",
    int: "a whole number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
    object: "any value",
}


class MessageError(RanksError):
    """A message of another rank is not what this version of the package writes."""


def encode(kind: str, fields: Mapping[str, Json]) -> str:
    """Return a message.

    Args:
        kind: Kind of the message.
        fields: Content of the message.

    Raises:
        TypeError: A value cannot be stored as JSON.
        ValueError: A number is not finite.
    """
    message = {"version": VERSION, "kind": kind, **fields}
    return json.dumps(message, separators=(",", ":"), allow_nan=False)


def decode(text: str, kind: str, types: Mapping[str, type], sender: str) -> dict[str, Json]:
    """Return the fields of a message.

    Args:
        text: The message.
        kind: Kind that is expected.
        types: Type of each field; `object` stands for any JSON value.
        sender: Rank that wrote the message, in words.

    Raises:
        MessageError: The message is damaged, has another kind or version, or a field is missing,
            unknown or of another type. The error says which, and names the sender.
    """
    try:
        message = parse_json(text.encode())
    except ValueError as error:
        raise MessageError(f"{sender}: a message is not JSON ({error}): restart the job") from error
    if not isinstance(message, dict):
        raise MessageError(f"{sender}: a message is {short(message)}, expected an object")
    version, found = message.pop("version", None), message.pop("kind", None)
    if type(version) is not int or version != VERSION:
        raise MessageError(
            f"{sender} writes messages of version {short(version)}, expected {VERSION}: install "
            "the same version of this package on all hosts"
        )
    if found != kind:
        raise MessageError(
            f"{sender}: the message is of kind {short(found)}, expected {kind!r}: call the same "
            "methods of the optimizer in the same order on all ranks"
        )
    return check_fields(message, types, f"{sender}: the message {kind!r}")


def check_fields(value: Json, types: Mapping[str, type], where: str) -> dict[str, Json]:
    """Return an object whose fields are exactly those that are expected."""
    if not isinstance(value, dict):
        raise MessageError(f"{where} is {short(value)}, expected an object")
    if value.keys() != types.keys():
        differing = ", ".join(sorted(value.keys() ^ types.keys()))
        raise MessageError(f"{where} has missing or unknown fields: {short(differing)}")
    for name, expected in types.items():
        found = value[name]
        if expected is not object and type(found) is not expected:
            raise MessageError(
                f"{where}: {name} is {short(found)}, expected {_JSON_TYPES[expected]}"
            )
    return value


def pairs_of(value: Json, first: type, second: type, where: str) -> list[tuple[Any, Any]]:
    """Return a list of pairs as tuples."""
    if not isinstance(value, list):
        raise MessageError(f"{where} is {short(value)}, expected a list")
    for pair in value:
        if not isinstance(pair, list) or [type(one) for one in pair] != [first, second]:
            raise MessageError(
                f"{where} has the entry {short(pair)}, expected {_JSON_TYPES[first]} and "
                f"{_JSON_TYPES[second]}"
            )
    return [(pair[0], pair[1]) for pair in value]
