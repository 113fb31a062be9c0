"""Small JSON documents that carry their own digest: manifests, part files and pins.

A document is ``{"format": 1, "digest": <of the body>, "body": {...}}``. It is padded with spaces to
a reserved size and ends in a newline. While a document is being rewritten, its file holds
``{"format": 1, "invalid": <why>}`` instead.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from offload.errors import OffloadError
from offload.format.strict_json import MAX_VALUES, num_marks, parse_json, short

_VERSION: Final = 1
"""Version of the format of all documents, the only one that is read."""

MAX_CONTENT_BYTES = 64 << 20
"""Largest size of a manifest or a table in bytes, without its padding. With `MAX_VALUES` it bounds
the memory that reading one takes. A model of 100,000 parameters needs a third of either limit."""


class DocumentError(ValueError):
    """The data is damaged, has another version, or is no document at all.

    The message does not name the file.
    """


class InvalidDocumentError(DocumentError):
    """The described object is being rewritten; the message is the reason in the document."""


def digest_of(body: Mapping[str, Any]) -> str:
    """Return the BLAKE2b digest of a body, in 32 hexadecimal digits."""
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()


def signed(body: Mapping[str, Any], *, compact: bool = False) -> bytes:
    """Return a document without its padding.

    Args:
        body: Content of the document.
        compact: Whether to leave out the spaces after commas and colons. This suits a document that
            may be long.

    Raises:
        ValueError: A number in the body is not finite.
    """
    document = {"format": _VERSION, "digest": digest_of(body), "body": body}
    separators = (",", ":") if compact else None
    return json.dumps(document, separators=separators, allow_nan=False).encode()


def invalid(reason: str, size_bytes: int) -> bytes:
    """Return an invalid document that gives the reason, padded to its reserved size."""
    return padded(json.dumps({"format": _VERSION, "invalid": reason}).encode(), size_bytes)


def padded(text: bytes, size_bytes: int) -> bytes:
    """Return a document padded to its reserved size; the caller ensures that it fits."""
    return text.ljust(size_bytes - 1) + b"\n"


def encode(body: Mapping[str, Any], size_bytes: int, what: str, *, or_do: str, why: str) -> bytes:
    """Return a long document, padded to its reserved size.

    Args:
        body: Content of the document.
        size_bytes: Reserved size.
        what: Name of the document, for messages: "the manifest".
        or_do: Advice for a document that is too long for readers.
        why: End of the message about a document that is too long for its reserved size.

    Raises:
        OffloadError: The document is larger than `size_bytes`, or than readers accept.
    """
    text = signed(body, compact=True)
    if len(text) > MAX_CONTENT_BYTES or num_marks(text) > MAX_VALUES:
        raise OffloadError(
            f"{what} would have {len(text)} bytes and about {num_marks(text)} values, at most "
            f"{MAX_CONTENT_BYTES} and {MAX_VALUES} are read: raise Options(chunk_bytes=), or "
            f"{or_do}"
        )
    if len(text) + 1 > size_bytes:
        raise OffloadError(
            f"{what} needs {len(text) + 1} bytes, but {size_bytes} were reserved{why}"
        )
    return padded(text, size_bytes)


def read(data: bytes, kind: str) -> dict[str, Any]:
    """Return the body of a document. The data is not trusted.

    Args:
        data: Content of the file.
        kind: Kind of document that is expected, for messages: "a manifest".

    Raises:
        InvalidDocumentError: The document says that it is invalid.
        DocumentError: The data is no such document, is damaged, or has another version.
    """
    try:
        document = parse_json(data)
    except ValueError as error:
        raise DocumentError(f"not {kind}: not a JSON document ({error})") from error
    if not isinstance(document, dict) or "format" not in document:
        raise DocumentError(f"not {kind}: it has no 'format'")
    version, body = document["format"], document.get("body")
    if type(version) is not int or version != _VERSION:
        raise DocumentError(
            f"format version {short(version)}, expected {_VERSION}; it was written by another "
            "version of this package"
        )
    if "invalid" in document:
        raise InvalidDocumentError(short(document["invalid"]))
    if not isinstance(body, dict) or document.get("digest") != _digest_or_none(body):
        raise DocumentError("damaged: its content does not match its digest")
    return body


def read_long(data: bytes, kind: str) -> dict[str, Any]:
    """Return the body of a document whose padding is optional; see `read` and `encode`."""
    content = data.removesuffix(b"\n").rstrip(b" ")
    if len(content) > MAX_CONTENT_BYTES:
        raise DocumentError(
            f"{len(content)} bytes of content, expected at most {MAX_CONTENT_BYTES}"
        )
    return read(content, kind)


@contextmanager
def decoding(path: str, kind: type[OffloadError], unsealed: str = "not sealed") -> Iterator[None]:
    """Turn the errors of reading a document and its fields into errors that name the file.

    Args:
        path: Path of the file.
        kind: Class of the errors.
        unsealed: What a document that says that it is invalid means.
    """
    try:
        yield
    except InvalidDocumentError as error:
        raise kind(f"{path}: {unsealed}: {error}") from error
    except DocumentError as error:
        raise kind(f"{path}: {error}") from error
    except KeyError as error:
        raise kind(f"{path}: contradictory content: {error} is missing") from error
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise kind(f"{path}: contradictory content ({type(error).__name__}: {error})") from error


def _digest_or_none(body: Mapping[str, Any]) -> str | None:
    try:
        return digest_of(body)
    except (ValueError, RecursionError):  # nested too deeply to be written
        return None
