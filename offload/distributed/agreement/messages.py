"""Messages between ranks: one JSON object each, with a version, a kind and fields of known types.

Ranks may run different versions of this package by mistake, which the version tells, and may reach
the same point of the protocol from different calls, which the kind tells. What a message carries
for the store is not checked field by field: ranks compare their versions before they open it.
"""

from __future__ import annotations

import dataclasses
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
}


class MessageError(RanksError):
    """A message of another rank is not what this version of the package writes."""


def encode(kind: str, fields: Mapping[str, Json]) -> str:
    """Return a message."""
    message = {"version": VERSION, "kind": kind, **fields}
    return json.dumps(message, separators=(",", ":"), allow_nan=False)


def decode(text: str, kind: str, types: Mapping[str, type], sender: str) -> dict[str, Json]:
    """Return the fields of a message, which are exactly those that are expected.

    Args:
        text: The message.
        kind: Kind that is expected.
        types: Type of each field; `object` stands for any JSON value.
        sender: Rank that wrote the message, in words, for errors.
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
    where = f"{sender}: the message {kind!r}"
    if message.keys() != types.keys():
        differing = ", ".join(sorted(message.keys() ^ types.keys()))
        raise MessageError(f"{where} has missing or unknown fields: {short(differing)}")
    for name, expected in types.items():
        value = message[name]
        if expected is not object and type(value) is not expected:
            raise MessageError(
                f"{where}: {name} is {short(value)}, expected {_JSON_TYPES[expected]}"
            )
    return message


def types_of(kind: type) -> dict[str, type]:
    """Return the fields of a dataclass as `decode` expects them; those with parts are any value."""
    plain = {"str": str, "int": int, "bool": bool}
    return {field.name: plain.get(str(field.type), object) for field in dataclasses.fields(kind)}


def tuples_of(value: Json) -> Any:
    """Return a value out of a message with tuples in place of lists, at any depth."""
    if isinstance(value, dict):
        return {name: tuples_of(one) for name, one in value.items()}
    return tuple(map(tuples_of, value)) if isinstance(value, list | tuple) else value
