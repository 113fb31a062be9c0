"""Errors that cross the connection: a class that both ends know, and its message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gds.errors
import offload.errors
from gds import StorageError
from offload.errors import NearError

_BUILTIN = (TypeError, ValueError, KeyError, RuntimeError, MemoryError)


def encode_error(error: BaseException) -> dict[str, Any]:
    """Return an error as a document."""
    number = getattr(error, "errno", None)
    return {
        "classes": [one.__name__ for one in type(error).__mro__],
        "message": (str(error) or type(error).__name__)[:8000],
        "errno": number if isinstance(number, int) else None,
    }


def decode_error(document: Mapping[str, Any], peer: str) -> Exception:
    """Return the error in a document: of the nearest class that is known here.

    Nothing that the document says can make this raise, or make an error of another kind.
    """
    message = f"{peer}: {document.get('message')}"[:10_000]
    number = document.get("errno")
    classes = document.get("classes")
    for name in classes if isinstance(classes, list) else []:
        if not isinstance(name, str):
            continue
        for module in (offload.errors, gds.errors):
            kind = getattr(module, name, None)
            if isinstance(kind, type) and issubclass(kind, gds.errors.OffloadError):
                return _made(kind, message, number if isinstance(number, int) else 5)
        for builtin in _BUILTIN:
            if builtin.__name__ == name:
                return builtin(message)
    return NearError(message)


def _made(kind: type[Exception], message: str, number: int) -> Exception:
    """Return an error of a class whose constructor takes a message, or a number and a message."""
    if issubclass(kind, StorageError):
        error = kind.__new__(kind)
        OSError.__init__(error, number, message)
        error.offset = None
        return error
    if issubclass(kind, OSError) and kind is not NearError:
        return kind(number, message)
    return kind(message)
