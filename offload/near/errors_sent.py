"""Errors that cross the connection: a class that both ends know, and its message."""

from __future__ import annotations

import os
from collections.abc import Mapping
from errno import EIO
from typing import Any

import gds.errors
import offload.errors
from gds import StorageError
from offload.errors import NearError

_MOST_TEXT = 8000
_BUILTIN = (TypeError, ValueError, KeyError, RuntimeError, MemoryError)


def encode_error(error: BaseException) -> dict[str, Any]:
    """Return an error as a document."""
    found: dict[str, Any] = {
        "classes": [one.__name__ for one in type(error).__mro__],
        "message": (str(error) or type(error).__name__)[:_MOST_TEXT],
    }
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        found["errno"] = error.errno
        found["message"] = str(error.strerror)[:_MOST_TEXT]
        found["path"] = os.fsdecode(error.filename)[:_MOST_TEXT]
    return found


def decode_error(document: Mapping[str, Any], peer: str) -> Exception:
    """Return the error in a document: of the nearest class that is known here.

    Nothing that the document says can make this raise, or make an error of another kind.
    """
    message = str(document.get("message"))[:_MOST_TEXT]
    number, path = document.get("errno"), document.get("path")
    classes = document.get("classes")
    for name in classes if isinstance(classes, list) else []:
        kind = _known(name)
        if kind is not None and issubclass(kind, OSError) and kind is not NearError:
            place = f"{peer}: {str(path)[:_MOST_TEXT]}" if path else peer
            return _os_error(kind, number if isinstance(number, int) else EIO, message, place)
        if kind is not None:
            return kind(f"{peer}: {message}")
    return NearError(f"{peer}: {message}")


def _known(name: object) -> type[Exception] | None:
    """Return the class with a name, if it is one that crosses."""
    for module in (offload.errors, gds.errors):
        kind = getattr(module, name, None) if isinstance(name, str) else None
        if isinstance(kind, type) and issubclass(kind, gds.errors.OffloadError):
            return kind
    return next((kind for kind in _BUILTIN if kind.__name__ == name), None)


def _os_error(kind: type[OSError], number: int, message: str, place: str) -> OSError:
    """Return an error with this message, whatever the constructor of its class takes."""
    error = kind.__new__(kind, number, message, place)
    OSError.__init__(error, number, message, place)
    if isinstance(error, StorageError):
        error.offset = None
    return error
