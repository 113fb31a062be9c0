"""Checks of values and files that a user gives: ranges of numbers, and files that are safe to read.

The ranges are far wider than any hardware, and narrow enough that no figure overflows.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from typing import Self

from offload.errors import SizingError
from offload.format.strict_json import short

MAX_COUNT = 1 << 30
"""Largest number of GPUs, slots and other things that are counted."""

_LEAST, _MOST = 1e-30, 1e30


class _Texts(dict[str, str]):
    def __missing__(self, name: str) -> str:
        return name


class FieldError(SizingError):
    """A field has a value that is not possible.

    Args:
        template: Message with fields in braces, for which a program may put names of its own.
        texts: Other texts that the message has in braces, such as the value.
    """

    def __init__(self, template: str, **texts: str) -> None:
        super().__init__(template.format_map(_Texts(texts)))
        self._template, self._texts = template, texts

    def naming(self, options: Mapping[str, str]) -> Self:
        """Return the error with the names of the options for fields in the message."""
        return type(self)(self._template, **{**options, **self._texts})


def require_positive(name: str, value: object) -> None:
    """Refuse a value that is neither None nor a positive number, with a `SizingError`."""
    if value is not None and (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not _LEAST <= value <= _MOST
    ):
        raise FieldError(
            f"{{{name}}} is {{value}}, expected a positive number, from {_LEAST:g} to {_MOST:g}",
            value=shown(value),
        )


def require_count(name: str, value: object, *, least: int = 1, most: int = MAX_COUNT) -> None:
    """Refuse a value that is not a whole number in a range, with a `SizingError`."""
    if type(value) is not int or not least <= value <= most:
        raise FieldError(
            f"{{{name}}} is {{value}}, expected a whole number of at least {least}, at most {most}",
            value=shown(value),
        )


def shown(value: object) -> str:
    """Return a `repr` of a value that fits a message."""
    try:
        return short(value)
    except ValueError:  # Python does not print integers of more than 4300 digits
        return "a number of thousands of digits"


def open_regular(path: str) -> int:
    """Return a descriptor to read a regular file; the caller closes it."""
    try:
        # Opening a pipe could block, and reading a device might never end.
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise SizingError(f"{shown_path(path)}: a directory, expected a file")
        if not stat.S_ISREG(mode):
            raise SizingError(f"{shown_path(path)}: a pipe, a socket or a device, expected a file")
        # If a pipe takes the name after the check, O_NONBLOCK keeps the opening from waiting.
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise SizingError(f"{shown_path(path)}: {error.strerror}") from error


def read_regular(path: str, max_bytes: int) -> bytes:
    """Return the content of a regular file."""
    with open(open_regular(path), "rb") as file:
        try:
            content = file.read(max_bytes + 1)
        except OSError as error:
            raise SizingError(f"{shown_path(path)}: {error.strerror}") from error
    if len(content) > max_bytes:
        raise SizingError(f"{shown_path(path)}: larger than {max_bytes} bytes")
    return content


def shown_path(path: str) -> str:
    """Return a path for a message; the empty path, which nobody would see, in quotes."""
    return path or "''"
