"""Parser of JSON from files that are not trusted; it accepts only what this package writes.

Python's `json` accepts more than JSON: NaN, Infinity, `1e999`, repeated keys, UTF-16, lone
surrogates in UTF-8, and integers whose conversion takes quadratic time. This package never writes
any of that, so this parser refuses it.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Sequence
from typing import Any, NoReturn

MAX_VALUES = 5_000_000
"""Largest number of marks in a document: commas, colons and opening brackets together. They bound
the number of values, because each value but the first follows a mark. The limit is needed because a
value of 3 bytes in the document may take 80 bytes of memory."""

_MAX_INTEGER_DIGITS = 20
"""Largest number of characters in a 64-bit integer, sign included."""


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 120


def parse_json(data: bytes, *, max_values: int | None = MAX_VALUES) -> Any:
    """Return the value of a JSON document in UTF-8.

    Time and memory are proportional to the length of `data`. `max_values` bounds the memory
    further.

    Args:
        data: The document.
        max_values: Largest number of marks; see `MAX_VALUES`. None is no limit, for a document of
            bounded length in which the writer may have put any number of values.

    Raises:
        ValueError: The data is not JSON, has too many values, is nested too deeply, has a key
            twice, or has a number that is not finite or an integer of more than 20 characters. The
            message says which.
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
        raise ValueError("nested too deeply") from error


def num_marks(data: bytes) -> int:
    """Return the number of commas, colons and opening brackets, those in strings included."""
    return sum(map(data.count, (b",", b":", b"[", b"{")))


def short(value: object) -> str:
    """Return a `repr` that fits a message, however long or deep a hostile file made the value."""
    return _REPR.repr(value)


def is_text(value: object) -> bool:
    """Return whether a value is a string of Unicode text, without lone surrogates."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:  # lone surrogates fit neither a digest nor a terminal
        return False
    return True


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"an object names a key twice: {short(key)}")
            seen.add(key)
    return result


def _integer(digits: str) -> int | float:
    if len(digits) > _MAX_INTEGER_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits, expected at most 20")
    # Other readers parse -0 as a float, and so refuse it as a size.
    return -0.0 if digits == "-0" else int(digits)


def _number(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"the number {short(digits)} is not finite")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
