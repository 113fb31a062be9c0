"""JSON as this package writes it, from a file that may be anything.

Python's `json` takes more than JSON: NaN, Infinity, `1e999`, a key twice, UTF-16, lone surrogates
in UTF-8, and integers whose conversion takes quadratic time. None of that is ever written here, so
none of it is read.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Sequence
from typing import Any, NoReturn

MAX_VALUES = 5_000_000
"""Most marks that a document may have in all: commas, colons, and brackets that open. There is one
before each value, and a value takes up to 80 bytes of memory where it takes 3 of the document."""

_MAX_INTEGER_DIGITS = 20
"""As many as 64 bits and a sign can have."""


class DuplicateKeyError(ValueError):
    """An object has a key twice."""


class NestingError(ValueError):
    """A document is nested too deeply."""


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 120


def parse_json(data: bytes, *, max_values: int | None = MAX_VALUES) -> Any:
    """Return the value of a JSON document in UTF-8.

    Time and memory are proportional to the length of `data`, and at most what `max_values` take.

    Args:
        data: The document.
        max_values: Most marks that it may have; see `MAX_VALUES`. None if its length is bounded,
            and whatever was written in it has to be read again.

    Raises:
        DuplicateKeyError: An object has a key twice.
        NestingError: It is nested too deeply.
        ValueError: It is not one, has too many values, a number that is not finite or an integer of
            more than 20 digits; says which.
    """
    if max_values is not None and (num := num_marks(data)) > max_values:
        raise ValueError(f"about {num} values, at most {max_values} are read")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte {error.start} is {data[error.start]:#04x}") from error
    try:
        return json.loads(
            text,
            object_pairs_hook=_unique,
            parse_int=_integer,
            parse_float=_number,
            parse_constant=_refuse_constant,
        )
    except RecursionError as error:
        raise NestingError("nested too deeply") from error


def num_marks(data: bytes) -> int:
    """Return the commas, colons and opening brackets in a document; those in strings count, too."""
    return sum(map(data.count, (b",", b":", b"[", b"{")))


def short(value: object) -> str:
    """Return a repr that fits a message, however long or deep a hostile file made the value."""
    return _REPR.repr(value)


def is_text(value: object) -> bool:
    """Return whether a value is a string of Unicode text, without lone surrogates."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:  # neither a digest nor a terminal takes it
        return False
    return True


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise DuplicateKeyError(f"an object names a key twice: {short(key)}")
            seen.add(key)
    return result


def _integer(digits: str) -> int | float:
    if len(digits) > _MAX_INTEGER_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits, expected at most 20")
    # Other readers take -0 for a float, and so refuse it as a size.
    return -0.0 if digits == "-0" else int(digits)


def _number(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"the number {short(digits)} is not finite")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
